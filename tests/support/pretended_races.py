"""What torch touches on the pretended device, told to the watch for races (device/races.cpp).

The emulated kernels, copies and events tell of themselves. Calls of torch are told here: they read
the tensors that they are given and write their results; by numbers of the device they read or write
what the numbers name. Views touch nothing. Of the host's memory only page-locked one is told, for
no other is the device's too. What NumPy does to page-locked memory is not seen, but where a test
says it (tests/device/page_locked.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from pathlib import Path

from tests.support.pretended_touches import runs

ROOT = str(Path(__file__).resolve().parents[2])
THROUGH = ("ess/kernels/", "ess/flashtrans/", "memory/uploads.py", "underway/uploads.py")


class Races:
    """Off outside of `watched`."""

    def __init__(self):
        self.is_on, self.driver, self.names = False, None, {}

    def load(self, driver):
        self.driver = driver
        pointer, number = ctypes.c_void_p, ctypes.c_size_t
        driver.races_touch.argtypes = [pointer, number, ctypes.c_bool]
        driver.races_touch_each.argtypes = [pointer, pointer, number, number, ctypes.c_bool]
        driver.races_forget.argtypes = driver.driver_let_go.argtypes = [pointer, number]
        driver.races_work.argtypes = [pointer, ctypes.c_bool, ctypes.c_char_p]
        driver.races_name.argtypes = [pointer, ctypes.c_char_p]
        driver.races_waited.argtypes = driver.driver_finish.argtypes = [pointer]
        driver.races_place.argtypes = [ctypes.c_char_p]
        driver.races_told.argtypes = [number]
        driver.driver_captures.argtypes = [pointer, ctypes.c_bool]
        driver.driver_captures.restype = ctypes.c_bool
        driver.races_told.restype = ctypes.c_char_p
        self.name(0, "compute")

    @contextlib.contextmanager
    def watched(self):
        """Gives what gives the sentences of all races in here so far."""
        self.driver.races_begin()
        self.is_on = True
        try:
            yield self._found
        finally:
            self.is_on = False
            self.driver.races_end()

    def _found(self):
        told = map(self.driver.races_told, itertools.count())
        return [sentence.decode() for sentence in itertools.takewhile(bool, told)]

    # ---- what Python tells

    def place_of(self, name):
        return f"{caller()} {name}" if self.is_on else name

    def place(self, name):
        """Work of the driver that is queued from here on is named so."""
        if self.is_on:
            self.driver.races_place(name.encode())

    def name(self, stream, name):
        self.names[stream] = name
        self.driver.races_name(stream, name.encode())

    def finish(self, stream):
        self.driver.driver_finish(stream)

    def waited(self, stream):
        if self.is_on:
            self.driver.races_waited(stream)

    def forget(self, tensors):
        """They lie in memory that is new."""
        for each in tensors:
            storage = each.untyped_storage()
            self.driver.races_forget(storage.data_ptr(), storage.nbytes())

    def touched(self, stream, name, reads, writes):
        """`stream` is None for the host. A touch is a tensor, or a tensor and parts of it."""
        self.driver.races_work(stream, stream is None, name.encode())
        for touches, is_write in ((reads, False), (writes, True)):
            for touch in touches:
                self._touch(*(touch if isinstance(touch, tuple) else (touch, None)), is_write)

    def _touch(self, tensor, offsets, is_write):
        """Parts: offsets of single elements, in elements."""
        if not tensor.numel():
            return
        size, at = tensor.element_size(), tensor.data_ptr()
        if offsets is None and tensor.is_contiguous():
            return self.driver.races_touch(at, tensor.numel() * size, is_write)
        offsets, run = runs(tensor) if offsets is None else offsets
        offsets = (offsets.reshape(-1).unique() * size).contiguous()
        self.driver.races_touch_each(at, offsets.data_ptr(), len(offsets), run * size, is_write)


def caller():
    """The nearest line of ours that does not only pass work on."""
    frame, last = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}/ess/"):
            last = f"{file.rpartition('/')[2]}:{frame.f_lineno}"
            if not any(part in file for part in THROUGH):
                return last
        frame = frame.f_back
    return last
