import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.environments import interpreter

CPU = Path(__file__).resolve().parents[3] / "images/sglang/cpu"


def serve(model: Path, port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CPU / "serve.py"), "--model", str(model), "--port", str(port)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def in_server_environment(program: str) -> str:
    """Runs a program as the server's processes run, and returns what it printed."""
    result = subprocess.run(
        [str(interpreter("sglang")), "-c", program],
        env={"PYTHONPATH": str(CPU / "path")},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_missing_model_is_one_line(tmp_path: Path) -> None:
    result = serve(tmp_path / "nowhere", 0)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert f"{tmp_path}/nowhere is no model folder" in result.stderr


def test_port_in_use_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = serve(tmp_path, port)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


@pytest.mark.slow
def test_torchvision_imports_and_torch_is_not_loaded_before_it() -> None:
    program = "import sys; before = 'torch' in sys.modules; import torchvision; print(before, 'torch' in sys.modules)"
    assert in_server_environment(program) == "False True"


@pytest.mark.slow
def test_absent_kernel_is_named_when_it_is_called() -> None:
    program = """
from sgl_kernel import silu_and_mul
from sgl_kernel.kvcacheio import transfer_kv_direct
for kernel in silu_and_mul, transfer_kv_direct:
    try:
        kernel()
    except NotImplementedError as error:
        print(error)
try:
    import sgl_kernel.scalar_type
except ImportError:
    print("no scalar_type")
"""
    assert in_server_environment(program).splitlines() == [
        "sgl_kernel.silu_and_mul is a compiled kernel: it is not in the CPU image",
        "sgl_kernel.kvcacheio.transfer_kv_direct is a compiled kernel: it is not in the CPU image",
        "no scalar_type",
    ]


@pytest.mark.slow
def test_cache_operations_move_slots_and_rows() -> None:
    program = """
import torch, sgl_kernel as k
slots = torch.arange(20, dtype=torch.int32).reshape(2, 10)
requests, start, end = torch.tensor([1, 0]), torch.tensor([2, 0]), torch.tensor([4, 3])
out = torch.zeros(5, dtype=torch.int64)
k.assign_extend_cache_locs_cpu(requests, slots, start, end, out)
print(out.tolist())
k.assign_req_to_token_pool_cpu(requests, slots, start, end, out + 100)
print(slots[1, 2:4].tolist(), slots[0, :3].tolist())
rows = torch.arange(8, dtype=torch.float32).reshape(4, 2)
pointers, strides = torch.tensor([rows.data_ptr()]), torch.tensor([8])
k.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([1, 0]), torch.tensor([0, 1]))
print(rows[:2].tolist())
"""
    assert in_server_environment(program).splitlines() == [
        "[12, 13, 0, 1, 2]",
        "[112, 113] [100, 101, 102]",
        "[[2.0, 3.0], [0.0, 1.0]]",
    ]


@pytest.mark.slow
def test_decoding_in_one_call_equals_the_backends_own_loop() -> None:
    program = """
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as backend
from batched_decode import batched
one_call = backend._run_sdpa_forward_decode
assert one_call.__module__ == "batched_decode", "the server would not use it"
(one_by_one,) = [c.cell_contents for c in one_call.__closure__]

torch.manual_seed(0)
requests, heads, shared, size, slots = 5, 6, 2, 16, 400
query = torch.randn(requests, heads, size)
keys, values = torch.randn(2, slots, shared, size)
rows = torch.randperm(slots - 1)[: 8 * 40].view(8, 40).add(1).to(torch.int32)
lengths = torch.tensor([1, 40, 7, 23, 40])
chosen = torch.tensor([6, 0, 3, 7, 2])
values[0] = float("nan")
for row, length in zip(chosen, lengths):
    rows[row, length:] = 0  # a slot of nobody
def run(decode, **more):
    output = torch.full_like(query, float("nan"))
    given = (None, query, output, keys, values, rows, chosen, lengths)
    decode(*given, scaling=0.3, enable_gqa=True, causal=False, is_cross_attn=False, **more)
    return output
torch.testing.assert_close(run(one_call), run(one_by_one))
torch.testing.assert_close(run(one_call, encoder_lens=torch.zeros(5, dtype=torch.long)), run(one_by_one))
print("equal")
"""
    assert in_server_environment(program).splitlines()[-1] == "equal"
