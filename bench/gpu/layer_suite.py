"""What needs torch and Triton: a layer with FlashTrans as gather, attention, shapes, experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ess.bench.gpu import attend, experts, shapes
from ess.bench.gpu.layer import Gather, layer_gpu_benchmark
from ess.bench.gpu.rig import Row
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.rows import flat_form, move_record


def layer_benchmark(*, smoke: bool) -> Iterator[Row]:
    return layer_gpu_benchmark(smoke=smoke, gather=gather_of(Device()))


def attend_benchmark(*, smoke: bool) -> Iterator[Row]:
    return attend.attend_benchmark(smoke=smoke, gather=gather_of(Device()))


def others_benchmark(*, smoke: bool) -> Iterator[Row]:
    return attend.others_benchmark(smoke=smoke, gather=gather_of(Device()))


def shapes_benchmark(*, smoke: bool) -> Iterator[Row]:
    return shapes.shapes_benchmark(smoke=smoke)


def experts_benchmark(*, smoke: bool) -> Iterator[Row]:
    return experts.experts_benchmark(smoke=smoke)


def gather_of(device: Device) -> Gather:
    def gather(
        source: Tensor, rows: Tensor, target: Tensor, slots: Tensor, count: Tensor, blocks: int
    ) -> None:
        form = flat_form(source.shape[1])
        record = move_record(
            source=source.data_ptr(),
            source_rows=rows.data_ptr(),
            source_stride=source.stride(0),
            target=target.data_ptr(),
            target_rows=slots.data_ptr(),
            target_stride=target.stride(0),
            count=count.data_ptr(),
            pair_count=len(rows),
        )
        stream = torch.cuda.current_stream().cuda_stream
        kernel = device.kernel(form.program, form.entry)
        kernel.launch(record, blocks=blocks, threads=form.threads, stream=stream)

    return gather
