"""Weights made on a device have the bits of those made on the host."""

import ctypes

import jax
import numpy as np
import pytest

import streaming
from ds4jax import experts as pool
from ds4jax import testing
from ds4jax.checkpoint import keys, load, synthetic_device
from ds4jax.checkpoint.synthetic import SyntheticSource
from pallas_kernels.routed_experts import with_scale_range

TINY = testing.tiny_config()


@pytest.fixture
def device():
    return jax.local_devices()[0]


def same_bits(made: jax.Array, wanted: np.ndarray) -> None:
    found = np.asarray(made)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize(
    "name",
    [
        "layers.2.attn.wq_b.weight",  # F8_E4M3
        "layers.2.attn.wq_b.scale",  # F8_E8M0
        "layers.2.attn.attn_sink",  # F32
        "layers.2.attn_norm.weight",  # BF16, one axis
        "layers.2.attn.compressor.wkv.weight",  # BF16, two axes
        "layers.2.ffn.experts.3.w2.scale",  # F8_E8M0
        "layers.2.ffn.experts.3.w2.weight",  # I8
        "layers.0.hc_attn_scale",  # three elements
    ],
)
def test_a_tensor_has_the_bits_of_the_host(name, device):
    source = SyntheticSource(TINY, 3)
    stored = source.read(name)
    if source.info(name).dtype == "F8_E8M0":
        stored = stored.view(np.uint8)
    made = synthetic_device.DeviceMaker(source, device).tensor(name, stored.dtype)
    same_bits(made, stored)


def test_a_token_table_has_the_numbers_of_the_host(device):
    source = SyntheticSource(TINY, 3)
    name = "layers.1.ffn.gate.tid2eid"
    made = synthetic_device.DeviceMaker(source, device).tensor(name, np.dtype(np.int32))
    same_bits(made, source.read(name).astype(np.int32))


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_a_slab_has_the_bits_of_the_host(experts, device):
    source = SyntheticSource(TINY, 5, experts=experts)
    chosen = (3, 0, 5)
    made = synthetic_device.DeviceMaker(source, device).slab(2, chosen)
    wanted = load.load_expert_slab(source, 2, chosen)
    assert made.format == wanted.format
    for found, expected in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        same_bits(found, expected)


def test_the_loader_takes_what_the_device_made(device, monkeypatch):
    """Every resident tensor, through the function that the engine calls."""
    source = SyntheticSource(TINY, 1)
    wanted = load.load_resident(source, device=device)
    wanted_slab = with_scale_range(load.load_expert_slab(source, 0, (1, 2)))
    monkeypatch.setattr(synthetic_device, "maker", synthetic_device.DeviceMaker)
    found = load.load_resident(source, device=device)
    slab = load.place_expert_slab(source, 0, (1, 2), device)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path((found, slab)),
        jax.tree_util.tree_leaves_with_path((wanted, wanted_slab)),
        strict=True,
    )
    for (path, made), (wanted_path, expected) in pairs:
        assert path == wanted_path
        same_bits(made, np.asarray(expected))


def test_the_host_makes_the_weights_of_a_cpu(device):
    assert synthetic_device.maker(SyntheticSource(TINY, 0), device) is None


def test_other_widths_are_refused(device):
    maker = synthetic_device.DeviceMaker(SyntheticSource(TINY, 0), device)
    with pytest.raises(NotImplementedError, match="not made as float32"):
        maker.tensor("layers.2.attn_norm.weight", np.dtype(np.float32))


def test_scales_follow_their_weights_in_a_group():
    source = SyntheticSource(TINY, 0)
    specs = keys.resident_tensors(TINY)
    names = keys.with_scales(specs, source.infos())
    assert len(names) == len(set(names)) > len(specs)
    assert "layers.0.attn.wq_a.scale" in names
    assert "layers.0.attn_norm.scale" not in names


def test_shared_experts_and_biases_have_the_bits_of_the_host(device):
    source = SyntheticSource(TINY, 0, distinct_layers=2, routing="zipf")
    maker = synthetic_device.DeviceMaker(source, device)
    name = "layers.4.ffn.gate.bias"
    same_bits(maker.tensor(name, np.dtype(np.float32)), source.read(name))
    slabs = [maker.slab(layer, (1, 5)) for layer in (0, 2)]
    same_bits(slabs[1].down, np.asarray(slabs[0].down))
    wanted = load.load_expert_slab(source, 2, (1, 5))
    same_bits(slabs[1].gate_up, wanted.gate_up)


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_a_store_is_filled_with_what_the_device_makes(experts, device, monkeypatch):
    source = SyntheticSource(TINY, 0, experts=experts, distinct_layers=3)
    monkeypatch.setattr(pool, "MADE_EXPERTS", 4)
    layout = pool.slab_layout(source, TINY.num_hidden_layers)
    order = streaming.even(TINY.num_hidden_layers, TINY.n_routed_experts, 7).streamed
    origins = [source.expert_origin(layer) for layer in range(TINY.num_hidden_layers)]
    store = streaming.HostStore(layout, order, origins=origins, policy="off")
    store.fill_layers(pool.layer_maker(synthetic_device.DeviceMaker(source, device), 0, None))
    assert store.nbytes == 3 * layout.block_bytes(len(order[0]))
    for layer, items in enumerate(order):
        (piece,) = store.pieces(layer, items)
        wanted = load.load_expert_slab(source, layer, items)
        for array, field in zip(piece.arrays, ("gate_up", "gate_up_scale", "down"), strict=False):
            same_bits(array, np.asarray(getattr(wanted, field)))
    store.close()


@pytest.mark.parametrize("refused", [False, True])
def test_a_store_is_filled_through_the_driver_or_without_it(refused, device):
    source = SyntheticSource(TINY, 0)

    class Driver:
        def read(self, address, device_address, nbytes):
            if refused:
                raise streaming.PinError("no")
            ctypes.memmove(address, device_address, nbytes)

    layout = pool.slab_layout(source, 1)
    store = streaming.HostStore(layout, [(1, 4)], policy="off")
    store.fill_layers(pool.layer_maker(synthetic_device.DeviceMaker(source, device), 0, Driver()))
    wanted = load.load_expert_slab(source, 0, (1, 4))
    same_bits(store.pieces(0, (1, 4))[0].arrays[0], np.asarray(wanted.gate_up))
    store.close()
