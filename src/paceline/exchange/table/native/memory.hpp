// Memory that comes zeroed, a page at a time as it is used, in large pages where there is much of it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace paceline {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    if (bytes >= kLarge) {
      madvise(data_, bytes, MADV_HUGEPAGE);  // a wish; without it there are more misses of the page tables
    }
#endif
  }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (data_ != nullptr) {
      munmap(data_, bytes_);
    }
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  static constexpr size_t kLarge = size_t{4} << 20;

  void swap(Memory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace paceline
