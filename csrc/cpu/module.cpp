// The extension module exists so that installers build and find the library, whose functions are
// called by name. Only `address` is Python's: NumPy takes microseconds for the same.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "native.h"

namespace ess {

static const char* asked() { return std::getenv("ESS_ISA"); }
static bool asks_for(const char* set) { return asked() && !std::strcmp(asked(), set); }

static Isa detect() {
    Isa best = Isa::portable;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        best = Isa::avx512;
    if (asks_for("portable")) best = Isa::portable;
    if (asks_for("avx2") && best == Isa::avx512) best = Isa::avx2;
    return best;
}

Isa isa() {
    static const Isa chosen = detect();
    return chosen;
}

bool has_bf16() {
    static const bool has = isa() == Isa::avx512 && __builtin_cpu_supports("avx512bf16") &&
                            __builtin_cpu_supports("avx512vnni") &&
                            (!asked() || asks_for("avx512_bf16"));
    return has;
}

#if defined(ESS_EMULATED_TILES)
static bool tiles_granted() { return !std::getenv("ESS_TILES_REFUSED"); }
#elif defined(__x86_64__) && defined(__linux__)
// The system gives tiles to a process that asks for them, and refuses where it cannot save them.
static bool tiles_granted() {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    constexpr long kRequest = 0x1023, kTileState = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16) || !(d & kTile)) return false;
    return syscall(SYS_arch_prctl, kRequest, kTileState) == 0;
}
#else
static bool tiles_granted() { return false; }
#endif

bool has_tiles() {
    static const bool has = has_bf16() && !asked() && tiles_granted();
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

// Where the first element of an array lies; 0 if it has none.
static PyObject* address(PyObject*, PyObject* array) {
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_STRIDES)) return nullptr;
    void* at = view.len ? view.buf : nullptr;
    PyBuffer_Release(&view);
    return PyLong_FromVoidPtr(at);
}

static PyMethodDef methods[] = {{"address", address, METH_O, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods,
                                 nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
