"""An accelerated model's parameters remain what they are, and however they change it follows."""

import copy
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.integrations.hugging_face import (
    CLASSES,
    DEVICE,
    GRIDS,
    bits_of,
    embed,
    make_tower,
    random_inputs,
    relative_error,
    tensors_of,
)
from triton_kernels.integrations import mlp
from triton_kernels.integrations.transformers import accelerate, restore

every_family = pytest.mark.parametrize("family", CLASSES)
TOLERANCE = 1e-5


def what_owners_see(tower):
    return {
        name: (id(x), type(x), x.shape, x.stride(), x.data_ptr(), x.dtype, x.requires_grad)
        for name, x in [*tower.named_parameters(), *tower.named_buffers()]
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_family
def test_parameters_and_buffers_are_never_touched(family, dtype, aligned):
    tower = make_tower(family).to(dtype)
    seen, bits = what_owners_see(tower), bits_of(tower)
    for change in (accelerate, embed, restore):
        change(tower)
        assert what_owners_see(tower) == seen
        assert all(torch.equal(x, bits[name]) for name, x in bits_of(tower).items())


def scaled(tower):
    return {name: 1.5 * x for name, x in tower.state_dict().items()}


def load(tower):
    tower.load_state_dict(scaled(tower))


def assign(tower):
    tower.load_state_dict(scaled(tower), assign=True)


def write_to_data(tower):
    for parameter in tower.parameters():
        parameter.data *= 1.5


def swap_data(tower):
    for parameter in tower.parameters():
        parameter.data = 1.5 * parameter.data


def swap_tensors(tower):
    for parameter in tower.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(1.5 * parameter.detach()))


def replace_parameters(tower):
    for module in list(tower.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(1.5 * parameter.detach()))


def write_to_shared_memory(tower):
    for parameter in tower.parameters():
        array = parameter.detach().cpu().numpy()  # tells PyTorch of no change
        array *= 1.5
        parameter.data.copy_(torch.from_numpy(array))


def make_noise(tower):
    generator = torch.Generator().manual_seed(9)
    for parameter in tower.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)


def reset(tower):
    torch.manual_seed(3)
    for module in tower.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def optimize(tower):
    tower.requires_grad_(True)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        tensors_of(tower(*random_inputs(tower, GRIDS["image"])))[-1].square().mean().backward()
        optimizer.step()
    shapes = [x["exp_avg"].shape for x in optimizer.state_dict()["state"].values()]
    assert shapes == [x.shape for x in tower.parameters() if x.grad is not None]


def flatten(tower):
    """All parameters in one buffer, as flat optimizers and sharding lay them."""
    flat = nn.utils.parameters_to_vector(tower.parameters()).detach() * 1.5
    nn.utils.vector_to_parameters(flat, tower.parameters())


CHANGES = (
    load, assign, write_to_data, swap_data, swap_tensors, replace_parameters,
    write_to_shared_memory, make_noise, reset, optimize, flatten,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_weights_is_followed(change, aligned):
    untouched, tower = make_tower("qwen2_5"), accelerate(make_tower("qwen2_5"))
    before = embed(tower)
    with torch.enable_grad():
        change(tower)
    untouched.load_state_dict(tower.state_dict())
    result = embed(tower)
    assert "operands" in aligned
    assert relative_error(result, before) > 0.01
    assert relative_error(result, embed_by_hugging_face(untouched)) < 1e-4


def embed_by_hugging_face(tower):
    return embed(restore(tower))


def test_memory_that_is_shared_is_the_parameters_own():
    tower = make_tower("qwen2_5")
    mine = {name: x.detach() for name, x in tower.named_parameters()}
    accelerate(tower)
    load(tower)
    assert all(torch.equal(mine[name], x) for name, x in tower.named_parameters())


def write_halves(parameters):
    for parameter in parameters:
        parameter.data.fill_(0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tower's memory is the GPU's")
def test_what_another_process_writes_is_read(aligned):
    untouched, tower = make_tower("qwen2_5"), accelerate(make_tower("qwen2_5").share_memory())
    embed(tower)
    context = multiprocessing.get_context("spawn")
    weights = [block.mlp.down_proj.weight for block in tower.blocks]
    process = context.Process(target=write_halves, args=([x.detach() for x in weights],))
    process.start()
    process.join()
    write_halves([block.mlp.down_proj.weight for block in untouched.blocks])
    assert relative_error(embed(tower), embed(untouched)) < TOLERANCE


def test_safetensors_saves_and_loads_the_model(tmp_path):
    from safetensors.torch import load_model, save_model

    tower = make_tower("qwen2_5")
    expected = embed(tower)
    save_model(accelerate(tower), tmp_path / "model.safetensors")
    other = accelerate(make_tower("qwen2_5"))
    write_to_data(other)
    load_model(other, tmp_path / "model.safetensors")
    assert relative_error(embed(other), expected) < TOLERANCE


def test_what_walks_parameters_writes_a_checkpoint_that_loads(tmp_path):
    tower = accelerate(make_tower("qwen2_5"))
    state = {name: x.detach() for name, x in tower.named_parameters()}
    tower.save_pretrained(tmp_path, state_dict=state)
    other = type(restore(tower)).from_pretrained(tmp_path).to(tower.device)
    assert torch.equal(embed(other), embed(tower))


_OF_CPUS = pytest.mark.skipif(
    torch.cuda.is_available(), reason="of CPUs, for which a GPU's Triton compiles nothing"
)


@_OF_CPUS
@pytest.mark.filterwarnings("ignore")  # FSDP1 is on its way out, and says so
@pytest.mark.parametrize("whole", [True, False])
def test_fsdp1_loads_what_it_is_given(mesh, whole, aligned):
    from torch.distributed.fsdp import FullyShardedDataParallel

    tower = accelerate(make_tower("qwen2_5").cpu())
    inputs = [x.cpu() for x in random_inputs(tower, GRIDS["image"])]
    expected = make_tower("qwen2_5").cpu()
    new = scaled(expected)
    expected.load_state_dict(new)
    options = {"use_orig_params": False, "device_id": torch.device("cpu")}
    if not whole:
        for index, block in enumerate(tower.blocks):
            tower.blocks[index] = FullyShardedDataParallel(block, **options)
    sharded = FullyShardedDataParallel(tower, **options)
    sharded.load_state_dict(new)
    assert relative_error(embed(sharded, inputs), embed(expected, inputs)) < TOLERANCE
    if not whole:  # and a tower whose blocks were sharded before
        accelerate(restore(tower))
        assert relative_error(embed(sharded, inputs), embed(expected, inputs)) < TOLERANCE


@_OF_CPUS
@pytest.mark.parametrize("before", [True, False])
def test_fsdp2_loads_its_own_checkpoint(mesh, before, aligned):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    expected = make_tower("qwen2_5").cpu()
    inputs = [x.cpu() for x in random_inputs(expected, GRIDS["image"])]
    write_to_data(expected)
    tower = make_tower("qwen2_5").cpu()
    if before:
        accelerate(tower)
    for part in (*tower.blocks, tower):
        fully_shard(part, mesh=mesh)
    accelerate(tower)
    state = get_model_state_dict(tower)
    set_model_state_dict(tower, {name: 1.5 * x for name, x in state.items()})
    assert relative_error(embed(tower, inputs), embed(expected, inputs)) < TOLERANCE
    assert "operands" in aligned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_aligned_product_is_as_precise(dtype, aligned):
    exact = make_tower("qwen2_5")
    inputs = random_inputs(exact, GRIDS["several"])
    tower = copy.deepcopy(exact).to(dtype)
    tower.rotary_pos_emb.to(torch.float32).inv_freq.copy_(exact.rotary_pos_emb.inv_freq)
    expected, theirs = embed(exact, inputs), embed(tower, inputs)
    ours = embed(accelerate(tower), inputs)
    assert "kernel" in aligned
    assert relative_error(ours, expected) <= 1.1 * relative_error(theirs, expected)


def test_a_bias_that_a_product_in_fp16_needs(aligned):
    tower = make_tower("qwen2_5").half()
    for block in tower.blocks:
        block.mlp.up_proj.weight.data.fill_(3e4)
        block.mlp.up_proj.bias.data.fill_(0)
    layer = tower.blocks[0].mlp
    x = torch.zeros(8, 64, dtype=torch.float16, device=tower.device)
    x[:, :3] = 1  # 9e4 before the bias
    layer.up_proj.bias.data.fill_(-6e4)
    expected = layer(x)
    assert expected.isfinite().all()
    accelerate(tower)
    assert relative_error(layer(x), expected) < 2e-3


@pytest.mark.parametrize("trained", ["all", "later blocks", "an MLP"])
def test_gradients_of_an_aligned_tower(aligned, trained):
    untouched, tower = make_tower("qwen2_5").train(), accelerate(make_tower("qwen2_5").train())
    gradients = []
    for each in (untouched, tower):
        if trained == "an MLP":  # whose input wants no gradient
            each.requires_grad_(False)
            each.blocks[0].mlp.requires_grad_()
        else:
            each.blocks[0].requires_grad_(trained == "all")
        inputs = random_inputs(each, GRIDS["several"])
        tensors_of(each(*inputs))[-1].square().mean().backward()
        gradients.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
    assert "recorded" in aligned
    expected, results = gradients
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert relative_error(result, expected[name]) < 1e-4, name


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_misaligned_follows_from_the_product_s_dtype(monkeypatch, autocast):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert mlp.is_misaligned(on_gpu, 3420) == autocast


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_an_aligned_tower_in_autocast(aligned):
    tower = make_tower("qwen2_5")
    with torch.autocast(tower.device.type, torch.bfloat16):
        expected = embed(tower)
        result = embed(accelerate(tower))
    assert result.dtype == expected.dtype
    assert relative_error(result, expected) < 2e-2


def test_an_aligned_block_compiles_whole(aligned):
    torch.compiler.reset()
    tower = accelerate(make_tower("qwen2_5"))
    expected = embed(tower)
    for block in tower.blocks:
        block.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    assert relative_error(embed(tower), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "tokens", "channels", "width", "rows"),
    [(torch.bfloat16, 300, 200, 266, 40), (torch.float16, 1, 64, 3420, 300)],
)
def test_operands_have_rows_filled_up_with_zeros(dtype, tokens, channels, width, rows, aligned):
    generator = torch.Generator().manual_seed(0)
    sizes = (tokens, channels), (width, channels), (width,), (width, channels), (width,)
    x, *layers, down = (
        torch.randn(size, generator=generator).to(DEVICE, dtype) for size in (*sizes, (rows, width))
    )
    mlp._aligned_operands(x, *layers, down)
    # Tensors that begin anywhere, as in one flat buffer, where others have been before.
    x, *layers, down = (
        torch.cat([each.flatten()[:1], each.flatten()])[1:].view(each.shape)
        for each in (x, *layers, down)
    )
    hidden, weight = mlp._aligned_operands(x, *layers, down)
    assert "kernel" in aligned
    assert hidden.shape[1] == weight.shape[1] == mlp.aligned_width(down) > width
    assert torch.equal(weight[:, :width], down)
    assert not weight[:, width:].any()
    assert not hidden[:, width:].any()
    gate_weight, gate_bias, up_weight, up_bias = (each.double() for each in layers)
    gate = nn.functional.linear(x.double(), gate_weight, gate_bias)
    up = nn.functional.linear(x.double(), up_weight, up_bias)
    exact = nn.functional.silu(gate) * up
    # Rounded once.
    assert relative_error(hidden[:, :width].double(), exact) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("place", ["behind it", "before it", "where it is", "too far"])
def test_the_weight_of_up_may_lie_anywhere(place, monkeypatch, aligned):
    generator = torch.Generator().manual_seed(0)
    sizes = (9, 64), (2, 72, 64), (72,), (72,), (16, 72)
    x, both, gate_bias, up_bias, down = (
        torch.randn(size, generator=generator).to(DEVICE, torch.bfloat16) for size in sizes
    )
    gate, up = reversed(both) if place == "before it" else both
    if place == "where it is":
        up = gate
    if place == "too far":
        monkeypatch.setattr(mlp, "can_describe", lambda _: False)
    hidden, _ = mlp._aligned_operands(x, gate, gate_bias, up, up_bias, down)
    assert "kernel" in aligned
    projected = (
        nn.functional.linear(x.double(), weight.double(), bias.double())
        for weight, bias in ((gate, gate_bias), (up, up_bias))
    )
    exact = nn.functional.silu(next(projected)) * next(projected)
    assert relative_error(hidden[:, :72].double(), exact) < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("i", range(6))
@pytest.mark.usefixtures("aligned")
def test_each_address_counts_where_16_bytes_are_read_at_once(monkeypatch, i):
    """Descriptors are of addresses at 16 bytes; what else begins elsewhere has no known binary."""
    launched = []
    monkeypatch.setattr(mlp, "launch_kernel", lambda *arguments: launched.append(arguments))
    sizes = (6, 64), (84, 64), (84,), (84, 64), (84,), (64, 84)
    operands = [torch.zeros(size, dtype=torch.bfloat16, device=DEVICE) for size in sizes]
    operands[i] = torch.cat([operands[i].flatten()[:1], operands[i].flatten()])[1:].view(sizes[i])
    mlp._aligned_operands(*operands)
    [(call, _, _, described)] = launched
    assert [address % 16 for address in described] == [0] * 3
    assert (call.binary is None) == (i == 5)  # the last weight; of biases no two numbers at once


@pytest.mark.usefixtures("aligned")
def test_the_operator_is_as_it_says():
    layer = make_tower("qwen2_5").blocks[0].mlp
    x = torch.randn(6, 64, device=layer.bfloat16().down_proj.weight.device, dtype=torch.bfloat16)
    gate, up, down = layer.gate_proj, layer.up_proj, layer.down_proj
    arguments = x, gate.weight, gate.bias, up.weight, up.bias, down.weight
    arguments = tuple(each.detach() for each in arguments)
    torch.library.opcheck(mlp._operator, arguments)


@pytest.mark.gpu
def test_a_cuda_graph_reads_what_is_loaded_later():
    tower = make_tower("qwen2_5").bfloat16()
    layer = tower.blocks[0].mlp
    x = torch.randn(128, 64, dtype=torch.bfloat16, device="cuda")
    accelerate(tower)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        load(tower)
        graph.replay()
        assert torch.equal(result, layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_serves_16_bits_on_a_gpu(monkeypatch, dtype):
    ways, launch = [], mlp.launch_kernel
    monkeypatch.setattr(mlp, "launch_kernel", lambda *x: ways.append("kernel") or launch(*x))
    tower = make_tower("qwen2_5").to(dtype)
    inputs = random_inputs(tower, GRIDS["several"])
    theirs = embed(tower, inputs)
    assert relative_error(embed(accelerate(tower), inputs), theirs) < 2e-2
    assert len(ways) == len(tower.blocks)
    ways.clear()
    embed(tower.float(), inputs)  # 84 in 32 bits is aligned
    assert not ways
