"""The CUDA driver, checked: a device, its context (which torch uses too), its kernels.

Handles of the driver are plain numbers here. The caller makes a Device and passes it on; it keeps
the programs that it has loaded.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final, NamedTuple

from ess.errors import BadState, Unavailable, not_installed
from ess.kernels.cuda import program
from ess.kernels.cuda.program import Program
from ess.kernels.cuda.ranges import PinnedRanges

NOT_READY: Final = 600
STATIC_SHARED_BYTES: Final = 48 << 10
ENTRY_EDITION: Final = 12000

# The architectures whose own instructions a plain number would leave out.
_OWN: Final = (90, 100, 101, 103, 110, 120, 121)


class Kernel(NamedTuple):
    """A function on a device; a launch takes one record by value."""

    device: Device
    handle: int
    entry: str

    def launch(
        self,
        record: ctypes.Structure,
        *,
        blocks: int,
        threads: int,
        stream: int,
        shared_bytes: int = 0,
    ) -> None:
        """Queues it and returns; the record is copied at once, the memory it names is not."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(record))
        self.device.make_current()
        grid = (blocks, 1, 1, threads, 1, 1, shared_bytes)
        call("cuLaunchKernel", self.handle, *grid, stream, ctypes.addressof(arguments), 0)


class Device:
    """A GPU. Without one, creating it raises Unavailable with the reason."""

    def __init__(self, ordinal: int = 0) -> None:
        call("cuInit", 0)
        self._handle = call("cuDeviceGet", ordinal)
        self.name = call("cuDeviceGetName", 256, self._handle).split(b"\0")[0].decode()
        self.sm_count = _number(self._handle, "MULTIPROCESSOR_COUNT")
        self.capability = _capability(self._handle)
        self.shared_bytes = _number(self._handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.has_clusters = _number(self._handle, "CLUSTER_LAUNCH") == 1
        self.host_node = self._host_node()
        self.pinned = PinnedRanges()
        self.context = call("cuDevicePrimaryCtxRetain", self._handle)
        self._modules: dict[Program, Any] = {}
        self._kernels: dict[tuple[Program, str], Kernel] = {}
        self.make_current()

    @property
    def arch(self) -> str:
        return _arch(self.capability)

    def make_current(self) -> None:
        """Makes the context current in the calling thread."""
        call("cuCtxSetCurrent", self.context)

    def kernel(self, source: Program, entry: str, *, shared_bytes: int = 0) -> Kernel:
        """Compiled for this device and loaded, once each."""
        kernel = self._kernels.get((source, entry))
        if kernel is None:
            kernel = self._load(source, entry, shared_bytes)
            self._kernels[source, entry] = kernel
        return kernel

    def _load(self, source: Program, entry: str, shared_bytes: int) -> Kernel:
        self.make_current()
        if source not in self._modules:
            self._modules[source] = self._module(source)
        handle = int(call("cuModuleGetFunction", self._modules[source], entry.encode()))
        if shared_bytes > STATIC_SHARED_BYTES:
            wanted = constant("CUfunction_attribute", "MAX_DYNAMIC_SHARED_SIZE_BYTES")
            call("cuFuncSetAttribute", handle, wanted, shared_bytes)
        return Kernel(self, handle, entry)

    def _module(self, source: Program) -> Any:
        code = program.cubin(source, self.arch)
        status, *module = attempt("cuModuleLoadData", code)
        if status:
            raise Unavailable(
                f"{source} for {self.arch} cannot be loaded: {fault('cuModuleLoadData', status)}; "
                "`ess build-kernels` compiles it anew"
            )
        return module[0]

    def wait_for_all(self) -> None:
        """Waits for all streams before memory is freed, since any of them may use it; their own
        handles may be gone already. At interpreter exit the driver may be gone as well, and with it
        all queued work."""
        attempt("cuCtxSetCurrent", self.context)
        attempt("cuCtxSynchronize")

    def memory(self) -> tuple[int, int]:
        """Bytes that are free now, and all bytes."""
        self.make_current()
        status, *answer = attempt("cuMemGetInfo")
        if status:
            raise fault("cuMemGetInfo", status)
        free_bytes, total_bytes = map(int, answer)
        return free_bytes, total_bytes

    def _host_node(self) -> int:
        """The node of the machine whose memory is near; -1 where the driver does not know it."""
        wanted = constant("CUdevice_attribute", "HOST_NUMA_ID")
        status, *answer = attempt("cuDeviceGetAttribute", wanted, self._handle)
        return -1 if status else int(answer[0])


@functools.cache
def shared_device(ordinal: int) -> Device:
    """The device object that all pools and movers of this process share, so that each program is
    loaded once."""
    return Device(ordinal)


def _number(handle: int, name: str) -> int:
    return int(call("cuDeviceGetAttribute", constant("CUdevice_attribute", name), handle))


def _capability(handle: int) -> tuple[int, int]:
    major, minor = (_number(handle, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return major, minor


def _arch(capability: tuple[int, int]) -> str:
    number = 10 * capability[0] + capability[1]
    return f"sm_{number}a" if number in _OWN else f"sm_{number}"


def call(name: str, *arguments: Any) -> Any:
    """Calls a driver function; its result, or None where it has none."""
    status, *results = attempt(name, *arguments)
    if status:
        raise fault(name, status)
    return results[0] if results else None


def attempt(name: str, *arguments: Any) -> tuple[Any, ...]:
    """The status as a number, then the results."""
    try:
        status, *results = getattr(_driver(), name)(*arguments)
    except RuntimeError as error:
        raise Unavailable(f"there is no CUDA driver here: {error}") from None
    return int(status), *results


def fault(name: str, status: int) -> Unavailable | BadState:
    sentence = f"{name} answers {_name_of(status)} ({status})"
    if name in ("cuInit", "cuDeviceGet", "cuMemHostRegister", "cuMemAlloc"):
        return Unavailable(sentence)
    return BadState(
        f"{sentence}: an earlier kernel may have failed" if is_broken(status) else sentence
    )


def is_broken(status: int) -> bool:
    """Whether the status means that the context may be lost: then every later call fails too."""
    return 700 <= status < 720


def _name_of(status: int) -> str:
    try:
        return str(_driver().CUresult(status).name)
    except ValueError:
        return "what cuda-bindings have no name for"


def constant(kind: str, name: str) -> Any:
    """An attribute by its name without the prefix that all of its kind have."""
    prefix = {
        "CUdevice_attribute": "CU_DEVICE_ATTRIBUTE",
        "CUfunction_attribute": "CU_FUNC_ATTRIBUTE",
    }
    return enumerated(kind, f"{prefix[kind]}_{name}")


def enumerated(kind: str, name: str) -> Any:
    return getattr(getattr(_driver(), kind), name)


def entry(name: str, *, edition: int = ENTRY_EDITION) -> int:
    """The address of a driver function for native code, in the form that CUDA of that `edition`
    declares; a later CUDA may declare more arguments under the same name. Names have no number of
    a form: `cuMemAlloc`, never `cuMemAlloc_v2`."""
    address = call("cuGetProcAddress", name.encode(), edition, 0)
    if not address:
        raise Unavailable(f"the CUDA driver has no {name} of {edition}")
    return int(address)


def why_missing(ordinal: int = 0) -> str | None:
    """A line for people, or None where there is a device whose kernels are there or can be made.
    The device is not opened."""
    try:
        if call("cuInit", 0) is None and call("cuDeviceGetCount") > ordinal:
            no_compiler = program.why_missing()
            if no_compiler is None:
                return _why_too_old()
            arch = _arch(_capability(call("cuDeviceGet", ordinal)))
            return None if program.built_ahead(arch) else no_compiler
    except Unavailable as error:
        return str(error)
    return f"there is no CUDA device {ordinal}" if ordinal else "the CUDA driver sees no device"


def _why_too_old() -> str | None:
    """Within a generation of CUDA any driver loads the output of any compiler. A driver of an older
    generation does not, and says so only when the first kernel is loaded."""
    version, generation = int(call("cuDriverGetVersion")), program.compiler_generation()
    if version // 1000 >= generation:
        return None
    return (
        f"the driver is of CUDA {version // 1000}.{version % 1000 // 10} and does not load what "
        f"{program.compiler_version()} compiles: it must be of CUDA {generation} or later"
    )


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise not_installed(f"cuda-bindings ({error})", extra="cuda") from None
    return driver
