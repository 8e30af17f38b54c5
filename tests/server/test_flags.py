"""Flags under the names that others have for them, and those that are refused together."""

from __future__ import annotations

from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.server.commands import cli
from ess.server.commands.start import launch
from ess.server.commands.start.settings import read_file, resolve


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["-tp", "8", "--cp-size", "2"],
            "cp_size is 2, and tp_size is 8, pp_size",
        ),
        (["--disable-radix-cache"], "always shared"),
        (["--enable-dynamic-chunking"], "there tpot_ms sizes the chunks"),
        (["--chunked-prefil-size", "512"], "--chunked-prefill-size"),
        (["--max-num-seqs", "0"], "max_running is 0"),
        (["--watchdog-timeout", "0"], "watchdog_s is 0"),
        (["--mem-fraction-static", "200%", "--model-path", "x"], "'x' is not a folder"),
        (["--page-size", "16"], "--page-size must be 64"),
        (["--dp", "2", "--ep-size", "4"], "ep_size is 4 and dp_size is 2"),
        (["--data-parallel-size", "2", "--data-parallel-rank", "2"], "dp_rank is 2, must be 0 to"),
        (["--dp", "2", "--dp-rank", "1"], "dist_init_addr is missing: 2 ranks"),
        (["--dp", "2", "--disaggregation-mode", "prefill"], "dp_size is 2, and role is prefill"),
        (["--dp", "2", "--device", "cuda:1"], "device is cuda:1, and 2 ranks start here"),
        (
            ["--dp", "2", "--device", "cuda", "--sbo", "combine-down"],
            "sbo is combine-down, dp_size 2 and device cuda",
        ),
        (["-tp", "8", "--device", "cuda"], "; dp_size 8 uses 8 devices: each has requests of its"),
        (["-pp", "2", "-dpn", "0", "--device", "cuda"], "; dp_size 2 uses 2 devices: each has"),
        (
            ["-pcp", "4", "--device", "cuda", "--disaggregation-mode", "prefill"],
            "; pp_size 4 gives each of 4 devices its layers",
        ),
        (["--tp", "8", "--dp", "8", "--device", "cuda"], "; dp_size 64 uses 64 devices: each"),
        (["-dp", "8", "-ep", "--sbo", "combine-down", "--device", "cuda"], "dp_size 8 and device"),
        (["-dp", "16", "-dpl", "8"], "-local is not served: --nnodes and --node-rank divide"),
        (["-dp", "2", "-dpa", "h", "-dpp", "9"], "--data-parallel-address is not served: --dist-i"),
        (["-tp", "8", "-dcp", "8"], "must be 1: a rank of --dp-size has the whole contexts of its"),
        (["--tokenizer-mode", "deepseek_v32", "--port", "-1"], "--tokenizer-mode has no effect"),
        (["--dp", "2", "--deterministic"], "dp_size is 2, and deterministic is set"),
        (
            ["--dp", "2", "--dp-rank", "0", "--dist-init-addr", "10.1.2.3:29500"],
            "10.1.2.3:29500, which other machines reach: give all ranks --peer-secret-file",
        ),
        (["--ep-num-redundant-experts", "8"], "redundant_experts is 8, and dp_size is 1"),
        (["--dp", "2", "--eplb-config.num_redundant_experts", "9999"], "must be 0 to 8 for 8"),
        (["--dp", "3"], "8 experts cannot be shared equally by 3 ranks"),
        (["--log-level", "info", "--tp", "2", "--cp-size", "2"], "cp_size is 2"),
        (
            ["--quantization", "fp8", "--port", "-1"],
            "--quantization has no effect: config.json says",
        ),
        (["--seed", "1", "--port", "-1"], "--seed has no effect: a request that wants the same"),
        (["--seed", "None", "--swap-space", "none", "--port", "-1"], "port is -1"),
        (["--enable-lora"], "--enable-lora is not served: there are no adapters"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config is not served: ess prefill"),
        (["x", "--api-key", "one", "secret"], "1 word has no place: a value follows its flag"),
        (["x", "--served-model-name", "a", "b", "c"], "2 words have no place"),
        (["--load-format", "dummy"], "--load-format must be auto"),
        (["--disable-log-stats", "--port", "-1"], "--disable-log-stats has no effect: statistics"),
        (["--enable-log-requests", "--port", "-1"], "port is -1"),
        (
            ["--allowed-origins", "chat.example"],
            "allowed_origins has 'chat.example', must look like",
        ),
        (["--allow-credentials"], "--allow-credentials is not served: a page of another origin"),
        (["--generation-config", "vllm"], "--generation-config must be auto: --default-sampling"),
        (
            ["--default-chat-template-kwargs", "[1]"],
            "kwargs is not a JSON object",
        ),
        (
            ["--default-chat-template-kwargs", '{"tools": 1}'],
            "kwargs has tools: the server says",
        ),
        (["--override-generation-config", "{"], "default_sampling is not a JSON object of numbers"),
        (["--max-logprobs", "50"], "--max-logprobs must be 20"),
        (["--max-logprobs", "20", "--ssl-ca-certs", "x"], "tls_ca needs tls_cert"),
        (["--load-format", "safetensors", "--task", "auto", "--port", "-1"], "port is -1"),
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching is not served"),
        (["--chunked-prefill-size", "-1"], "chunk_tokens is -1, no chunks in SGLang's words:"),
        (["--no-enable-chunked-prefill", "--port", "-1"], "prefill has no effect: prompts always"),
        (["-O3", "--kv-offloading-size", "4", "--port", "-1"], "-level has no effect: --graphs"),
        (["--task", "embed"], "the flag --task must be generate"),
        (["--kv-cache-memory-bytes", "9"], "-bytes is not served: --slot-bytes and --host-bytes"),
        (["--tp", "8", "--dp", "0", "--enable-dp-attention"], "dp_size is 0"),
        (
            ["--enable-dp-attention", "--port", "-1"],
            "attention has --tp-size count the GPUs of all",
        ),
        (["--unread-bytes", "auto"], "unread_bytes: "),
        (["--unread-bytes", "0"], "unread_bytes is 0; must be at least 1MiB"),
        (["--body-bytes", "0"], "body_bytes is 0; must be at least 1KiB"),
        (["-dp", "3", "-ep"], "8 experts cannot be shared equally by 3 ranks"),
        (
            ["-pp", "2", "--nsa-decode-backend", "flashmla_kv", "--cp-size", "2"],
            "--nsa-decode-backend has no",
        ),
        (
            ["--disaggregation-transfer-backend", "mooncake"],
            "'mooncake': must be tcp, nixl, shared",
        ),
        (["--enable-two-batch-overlap", "--port", "-1"], "no effect: --tbo on runs steps in two"),
        (["--data-parallel-size-local", "4"], "--nnodes and --node-rank divide ranks evenly"),
        (["--enable-metrics", "--max-num-seqs", "0"], "--enable-metrics has no effect: /metrics"),
    ],
)
def test_what_others_call_it_is_understood_or_explained(
    flags: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    for start in ("listening", "run_node"):
        monkeypatch.setattr(launch, start, lambda *_: pytest.fail("no flag is refused"))
    assert cli.main(["serve", *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_file_in_yaml_is_told_what_settings_are_written_in(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 8000\n")
    with pytest.raises(BadInput, match=r"is not TOML: .* \(settings are TOML, as port = 8000, or"):
        read_file(file)


def test_what_divided_attention_says_of_gpus_holds_wherever_they_are_counted(tmp_path: Path):
    (file := tmp_path / "serve.toml").write_text("tp-size = 2\n")
    given, said = {"enable_dp_attention": True}, {"ESS_DP_SIZE": "2"}
    assert resolve(given, config=file, environment=said).settings.tp_size == 1
    assert resolve({**given, "tp_size": 2}, environment={}).settings.tp_size == 2
    with pytest.raises(BadInput, match="tp_size is 2 and dp_size is 3: with --enable-dp-attention"):
        resolve({**given, "dp_size": 3}, config=file, environment=said)


def test_variables_that_kernels_read_are_no_settings():
    named = {"ESS_ROWS": "plain", "ESS_ISA": "avx2", "ESS_CACHE_DIR": "/var/cache"}
    assert set(resolve({}, environment=named).origins.values()) == {"default"}
