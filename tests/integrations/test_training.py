"""An accelerated model trains as the untouched one, in whatever way it is trained."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.integrations.hugging_face import (
    DEVICE,
    GRIDS,
    embed,
    make_tower,
    random_inputs,
    relative_error,
    tensors_of,
)
from triton_kernels.integrations import mlp
from triton_kernels.integrations.transformers import accelerate

TOLERANCE = 1e-4


def loss_of(model, inputs):
    return sum(x.float().square().mean() for x in tensors_of(model(inputs[0], grid_thw=inputs[1])))


def gradients(model, inputs):
    model.zero_grad()
    loss_of(model, inputs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def together(tensors):
    return torch.cat([x.flatten().double() for x in tensors])


def assert_close(results, expected):
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert relative_error(result, expected[name]) < TOLERANCE, name


def take_steps(model, steps):
    # Its eps keeps it from making steps of what is only rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for images in steps:
        optimizer.zero_grad()
        (sum(loss_of(model, inputs) for inputs in images) / len(images)).backward()
        optimizer.step()


@pytest.fixture(params=["before", "after"])
def order(request):
    return request.param


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_autocast_is_no_further_from_fp32_than_hugging_faces(family, aligned):
    exact, theirs, ours = (make_tower(family).train() for _ in range(3))
    inputs = random_inputs(exact, GRIDS["several"])
    exact = together(gradients(exact, inputs).values())
    with torch.autocast(DEVICE, torch.bfloat16):
        theirs = together(gradients(theirs, inputs).values())
        ours = gradients(accelerate(ours), inputs)
    assert {x.dtype for x in ours.values()} == {torch.float32}
    assert ("recorded" in aligned) == (family == "qwen2_5")  # the other's MLP is another
    assert relative_error(together(ours.values()), exact) <= 1.1 * relative_error(theirs, exact)


def test_sharded_in_bf16_is_no_further_from_fp32_than_hugging_faces(mesh, order, aligned):
    exact, theirs, ours = (make_tower("qwen2_5").cpu().train() for _ in range(3))
    inputs = [x.cpu() for x in random_inputs(exact, GRIDS["several"])]
    exact = together(gradients(exact, inputs).values())
    if order == "before":
        accelerate(ours)
    for tower in (theirs, ours):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in (*tower.blocks, tower):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    accelerate(ours)
    theirs, ours = (
        together(x.full_tensor() for x in gradients(tower, inputs).values())
        for tower in (theirs, ours)
    )
    assert relative_error(ours, exact) <= 1.1 * relative_error(theirs, exact)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_a_gradient_scaler(aligned):
    """Steps whose gradients are beyond fp16 are left out, and the same ones."""
    runs = []
    for change in (lambda tower: tower, accelerate):
        tower = change(make_tower("qwen2_5").train())
        before = together(x.detach().clone() for x in tower.parameters())
        inputs = random_inputs(tower, [(1, 4, 6)])
        optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
        scaler, scales = torch.amp.GradScaler(DEVICE, init_scale=2.0**24), []
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                loss = loss_of(tower, inputs)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        runs.append((scales, together(x.detach() for x in tower.parameters()) - before))
    (their_scales, theirs), (our_scales, ours) = runs
    assert our_scales == their_scales
    assert their_scales[0] > their_scales[-1] == their_scales[-2]
    assert relative_error(ours, theirs) < 2e-2


# From the compiler, which asks each block's input for it, and hides the warning that is no error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_tower_trains(whole, aligned):
    torch.compiler.reset()
    tower = make_tower("qwen2_5").train()
    inputs = random_inputs(tower, GRIDS["several"])
    expected = {name: x.clone() for name, x in gradients(tower, inputs).items()}
    accelerate(tower)
    if whole:
        tower.compile(backend="aot_eager")
    else:
        for block in tower.blocks:
            block.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    assert_close(gradients(tower, inputs), expected)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_reentrant_checkpoints(family, aligned):
    untouched, tower = make_tower(family).train(), accelerate(make_tower(family).train())
    inputs = random_inputs(tower, GRIDS["several"])
    expected = gradients(untouched, inputs)
    for each in (untouched, tower):
        checkpoint_blocks(each, use_reentrant=True)
    assert_close(gradients(untouched, inputs), expected)
    assert_close(gradients(tower, inputs), expected)


def checkpoint_blocks(tower, **options):
    # transformers renames it on the way to 6.
    new = getattr(tower, "activation_checkpointing_enable", None)
    (new or tower.gradient_checkpointing_enable)(options)


def partition(tower):
    """As ZeRO-3 does: elements, and gradients, only while a module's pass needs them."""
    whole, gathered_gradients = {}, {}
    for name, parameter in tower.named_parameters():
        whole[parameter] = parameter.data
        parameter.data = parameter.data.new_empty(0)

        def keep(parameter, name=name):
            gathered_gradients[name], parameter.grad = parameter.grad, None
            parameter.data = parameter.data.new_empty(0)

        parameter.register_post_accumulate_grad_hook(keep)

    def gather(module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = whole[parameter]

    def release(module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)

    for module in (each for each in tower.modules() if each._parameters):
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        module.register_full_backward_pre_hook(gather)
    return gathered_gradients


# Of the patch embedding, whose input needs no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_parameters_that_are_partitioned_between_passes(checkpointed, order, aligned):
    untouched, tower = make_tower("qwen2_5").train(), make_tower("qwen2_5").train()
    inputs = random_inputs(tower, GRIDS["several"])
    expected = gradients(untouched, inputs)
    if order == "before":
        accelerate(tower)
    results = partition(tower)
    if order == "after":
        accelerate(tower)
    if checkpointed:
        checkpoint_blocks(tower, use_reentrant=False)
    loss_of(tower, inputs).backward()
    assert_close(results, expected)


def test_weights_that_are_offloaded_between_calls(order, aligned):
    """By the library accelerate, which leaves them without gradients: what stands before learns."""
    library = pytest.importorskip("accelerate")
    untouched, tower = make_tower("qwen2_5").train(), make_tower("qwen2_5").train()
    inputs = random_inputs(tower, GRIDS["several"])
    if order == "before":
        accelerate(tower)
    for model in (untouched, tower):
        library.cpu_offload(model, execution_device=torch.device(DEVICE), offload_buffers=True)
    if order == "after":
        accelerate(tower)
    assert {x.device.type for x in tower.parameters()} == {"meta"}
    result, expected = (gradient_of_patches(model, inputs) for model in (tower, untouched))
    assert relative_error(result, expected) < TOLERANCE


def gradient_of_patches(model, inputs):
    patches = inputs[0].clone().requires_grad_()
    loss_of(model, (patches, inputs[1])).backward()
    return patches.grad


# From peft, which asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_low_rank_adapters(checkpointed, order, tmp_path, aligned):
    """Trained, saved, loaded and merged, as by the untouched tower."""
    peft = pytest.importorskip("peft")
    layers = ["attn.qkv", "attn.proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=layers, r=4, init_lora_weights=False)

    def adapted(tower):
        torch.manual_seed(0)
        if checkpointed:
            checkpoint_blocks(tower, use_reentrant=True)
        return peft.get_peft_model(tower, config)

    untouched, tower = adapted(make_tower("qwen2_5").train()), make_tower("qwen2_5").train()
    tower = adapted(accelerate(tower)) if order == "before" else accelerate(adapted(tower))
    inputs = random_inputs(make_tower("qwen2_5"), GRIDS["several"])
    for model in (untouched, tower):
        take_steps(model, [[inputs]] * 2)
    trained = {name: x for name, x in untouched.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * len(layers) * len(make_tower("qwen2_5").blocks)
    assert_close(dict(tower.named_parameters()), dict(untouched.named_parameters()))

    tower.save_pretrained(tmp_path)
    expected = embed(untouched.eval(), inputs)
    loaded = peft.PeftModel.from_pretrained(make_tower("qwen2_5"), tmp_path)
    assert relative_error(embed(loaded, inputs), expected) < TOLERANCE
    loaded = peft.PeftModel.from_pretrained(accelerate(make_tower("qwen2_5")), tmp_path)
    assert relative_error(embed(loaded, inputs), expected) < TOLERANCE
    merged, theirs = tower.eval().merge_and_unload(), untouched.merge_and_unload()
    assert relative_error(embed(merged, inputs), expected) < TOLERANCE
    assert_close(merged.state_dict(), theirs.state_dict())
    assert "operands" in aligned  # its layers are plain again


def train_in_parallel(rank, device, store, inputs, directory):
    """One of two processes that train together; the first writes what became of it."""
    from torch import distributed

    mlp.is_misaligned = lambda *_: True  # on a CPU too, and in fp32
    backend = "gloo"
    if device == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    torch.set_num_threads(1)
    distributed.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    try:
        for wrap in WRAPPERS[device]:
            tower = make_tower("qwen2_5").to(device).train()
            trained, whole_state = wrap(tower)
            take_steps(trained, [[[x.to(device) for x in inputs[rank]]]] * 2)
            state = whole_state()
            if rank == 0:
                torch.save(state, directory / wrap.__name__)
    finally:
        distributed.destroy_process_group()


def replicated(tower):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(accelerate(tower)), tower.state_dict


def sharded_by_fsdp1(tower, offload=False):
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, StateDictType

    options = {
        "use_orig_params": True,
        "device_id": next(tower.parameters()).device,
        "cpu_offload": CPUOffload(offload_params=offload),
    }
    accelerate(tower)
    for index, block in enumerate(tower.blocks):
        tower.blocks[index] = FullyShardedDataParallel(block, **options)
    sharded = FullyShardedDataParallel(tower, **options)

    def whole_state():
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
            return sharded.state_dict()

    return sharded, whole_state


def offloaded_by_fsdp1(tower):
    return sharded_by_fsdp1(tower, offload=True)


def accelerated_then_sharded(tower):
    return sharded_by_fsdp2(accelerate(tower))


def accelerated_then_offloaded(tower):
    return sharded_by_fsdp2(accelerate(tower), offload_policy=CPUOffloadPolicy())


def sharded_then_accelerated(tower):
    checkpoint_blocks(tower, use_reentrant=False)
    sharded, whole_state = sharded_by_fsdp2(tower)
    return accelerate(sharded), whole_state


def sharded_by_fsdp2(tower, **options):
    from torch.distributed.device_mesh import init_device_mesh

    device = next(tower.parameters()).device
    mesh = init_device_mesh(device.type, (2,))
    for part in (*tower.blocks, tower):
        fully_shard(part, mesh=mesh, **options)
    # Each process gathers on its own device, also what is offloaded.
    return tower, lambda: {
        name: x.to(device).full_tensor() for name, x in tower.state_dict().items()
    }


ON_A_CPU = replicated, sharded_by_fsdp1, accelerated_then_sharded, sharded_then_accelerated
WRAPPERS = {"cpu": ON_A_CPU, "cuda": (*ON_A_CPU, offloaded_by_fsdp1, accelerated_then_offloaded)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_two_processes(device, tmp_path):
    tower = make_tower("qwen2_5").to(device).train()
    inputs = [[x.to(device) for x in random_inputs(tower, GRIDS[n])] for n in ("image", "several")]
    take_steps(tower, [inputs] * 2)
    inputs = [[x.cpu() for x in each] for each in inputs]
    arguments = device, (tmp_path / "store").as_uri(), inputs, tmp_path
    torch.multiprocessing.spawn(train_in_parallel, arguments, nprocs=2)
    for wrap in WRAPPERS[device]:
        assert_close(torch.load(tmp_path / wrap.__name__, map_location=device), tower.state_dict())
