// Where large memory lies: in huge pages where they are allowed, and spread over NUMA nodes.
#pragma once

#include <cstddef>
#include <vector>

namespace streamllm::cpu {

// From now on place_memory spreads pages evenly over these nodes (none: each page lies on the node of the
// thread that touches it first, which for weights would be one node for all). Returns whether the kernel lets
// us: containers may forbid the system call; if not, it is as with none. Throws std::invalid_argument for a
// negative node.
bool interleave_memory_over(const std::vector<int>& nodes);

// For a mapping that nobody has touched, `start` at a page. Only advice: what the kernel refuses costs speed.
void place_memory(void* start, size_t num_bytes);

}  // namespace streamllm::cpu
