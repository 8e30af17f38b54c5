// The extension module itself is empty: it exists so that installers build and find the library.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdlib>
#include <cstring>

#include "native.h"

namespace ess {

static Isa detect() {
    Isa best = Isa::portable;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        best = Isa::avx512;
    const char* asked = std::getenv("ESS_ISA");
    if (asked && !std::strcmp(asked, "portable")) best = Isa::portable;
    if (asked && !std::strcmp(asked, "avx2") && best == Isa::avx512) best = Isa::avx2;
    return best;
}

Isa isa() {
    static const Isa chosen = detect();
    return chosen;
}

bool has_bf16() {
    static const bool has = isa() == Isa::avx512 && __builtin_cpu_supports("avx512bf16") &&
                            __builtin_cpu_supports("avx512vnni") && !std::getenv("ESS_ISA");
    return has;
}

}  // namespace ess

ESS_EXPORT const char* ess_isa() {
    switch (ess::isa()) {
        case ess::Isa::avx512: return "avx512";
        case ess::Isa::avx2: return "avx2";
        default: return "portable";
    }
}

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr,
                                 nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
