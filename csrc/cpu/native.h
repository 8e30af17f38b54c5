// Shared by all native CPU sources: the export mark and the instruction sets chosen at run time.
// Plain C ABI: no Python object and no torch type crosses this border.
#pragma once

#include <cstddef>
#include <cstdint>

#define ESS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ess {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The widest set this machine has, unless ESS_ISA=portable|avx2|avx512 asks for less.
Isa isa();

// Whether bf16 products may be used; a set that ESS_ISA names is taken without its extensions.
bool has_bf16();

}  // namespace ess
