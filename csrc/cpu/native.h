// Shared by all native CPU sources: the export mark and the instruction sets chosen at run time.
// Plain C ABI: no Python object and no torch type crosses this border.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#define ESS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ess {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The widest set this machine has, unless ESS_ISA=portable|avx2|avx512|avx512_bf16 asks for less.
Isa isa();

// Whether products of bf16 and of bytes may be used; a set that ESS_ISA names is taken without what
// goes beyond it.
bool has_bf16();

// Whether tile registers may be used: the machine has them and the system, which is asked once for
// the process, saves them when threads change places.
bool has_tiles();

// On the clock of Python's time.monotonic_ns.
inline int64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace ess
