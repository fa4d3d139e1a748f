#include "weight_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "memory_placement.hpp"

namespace streamllm::cpu {

namespace {

constexpr size_t kMappingBytes = size_t{32} << 20;  // untouched pages of it take no memory
constexpr size_t kHugePage = size_t{2} << 20;

class Mapping {
 public:
  explicit Mapping(size_t num_bytes)
      : num_bytes_(num_bytes),
        memory_(mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    place_memory(memory_, num_bytes_);
  }
  ~Mapping() { munmap(memory_, num_bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // nullptr if it does not fit any more.
  uint8_t* cut(size_t num_bytes) {
    if (num_bytes > num_bytes_ - used_) return nullptr;
    uint8_t* start = static_cast<uint8_t*>(memory_) + used_;
    used_ += num_bytes;
    return start;
  }

 private:
  const size_t num_bytes_;
  void* const memory_;
  size_t used_ = 0;
};

}  // namespace

std::shared_ptr<uint8_t> allocate_weights(size_t num_bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Mapping> current;
  if (num_bytes > SIZE_MAX - kHugePage) throw std::bad_alloc();
  const size_t rounded = (num_bytes + 63) / 64 * 64;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Mapping> mapping = current.lock();
  uint8_t* start = mapping ? mapping->cut(rounded) : nullptr;
  if (start == nullptr) {
    mapping =
        std::make_shared<Mapping>(std::max(kMappingBytes, (rounded + kHugePage - 1) / kHugePage * kHugePage));
    start = mapping->cut(rounded);
    if (rounded < kMappingBytes) current = mapping;
  }
  return {std::move(mapping), start};
}

}  // namespace streamllm::cpu
