// Memory of weights: cut out of large mappings, so that huge pages can back small matrices too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace streamllm::cpu {

// `num_bytes` zeroed bytes, aligned to 64. The mapping that they lie in is given back when the last one cut
// out of it is gone. Throws std::bad_alloc.
std::shared_ptr<uint8_t> allocate_weights(size_t num_bytes);

}  // namespace streamllm::cpu
