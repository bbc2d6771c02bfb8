"""Safetensors under the user's own names: to and from plain PyTorch and Hugging Face."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.errors import CheckpointError
from paceline.placement.boxes import Patch
from paceline.placement.placements import Shard
from paceline.plan import Mesh
from paceline.train.checkpoint import Checkpointer, export_checkpoint, export_safetensors, load_safetensors
from tests.train.checkpoint.sharded import SHAPES, Piece, Sharded, adamw, placed, split, train


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


class Cut:
    """Any module, its parameters cut along their first dimension over ranks in this process."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self.mesh = Mesh.parse(f"fsdp={ranks}")
        self.ranks = tuple(range(ranks))
        first: dict[int, str] = {}
        state = module.state_dict(keep_vars=True)
        self.state_names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        self.pieces = []
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            whole = tensor.detach()
            parts = whole.tensor_split(ranks) if isinstance(tensor, nn.Parameter) else [whole] * ranks
            begin = 0
            for rank, part in enumerate(parts):
                split = isinstance(tensor, nn.Parameter)
                offset = (begin if split else 0, *[0] * (whole.dim() - 1))[: whole.dim()]
                begin += part.shape[0] if split else 0
                found = (Patch.single(offset, part.shape),)
                shape, owner = tuple(whole.shape), split or rank == 0
                self.pieces.append(Piece(name, rank, part.clone(), split, shape, found, owner))

    def shards(self):
        return iter(self.pieces)

    def full_state_dict(self):
        whole = {}
        for name, source in self.state_names.items():
            pieces = [piece for piece in self.pieces if piece.name == source and piece.owner]
            whole[name] = torch.cat([p.tensor for p in pieces]) if pieces[0].shape else pieces[0].tensor
        return whole


def test_export_is_what_load_state_dict_takes(tmp_path):
    torch.manual_seed(0)
    user = Tied()
    export_safetensors(Cut(user, 3), tmp_path / "new" / "model.safetensors")
    other = Tied()
    other.load_state_dict(load_file(tmp_path / "new" / "model.safetensors"), strict=True)
    for name, value in user.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(("source", "target"), [(1, 4), (4, 1), (3, 2)])
def test_exported_and_loaded_at_another_number_of_ranks(tmp_path, source, target):
    user = Cut(Tied(), source)
    export_safetensors(user, tmp_path / "model.safetensors")
    other = Cut(Tied(), target)
    load_safetensors(other, tmp_path)
    wanted = user.full_state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in other.full_state_dict().items())


def test_pieces_of_many_boxes_go_out_and_in(tmp_path):
    fused = [
        placed({}, {"qkv.weight": Shard(0, (16, 4, 4)), "": Shard(1)}),
        placed({"qkv.weight": Shard(0, 3)}, {"qkv.weight": Shard(1, 2), "": Shard(0)}),
    ]
    source, target = (Sharded("fsdp=2,tp=2", layout, seed=seed) for seed, layout in enumerate(fused))
    export_safetensors(source, tmp_path / "model.safetensors")
    load_safetensors(target, tmp_path)
    wanted = source.full_state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in target.full_state_dict().items())


def test_a_checkpoint_is_exported_without_its_module(tmp_path):
    module = Sharded("dp=2,fsdp=2", split(1, 0))
    optimizer = adamw(module)
    train(module, optimizer, range(1))
    Checkpointer(tmp_path / "run", module, optimizer).save(1, {}, block=True)
    export_checkpoint(tmp_path / "run" / "step-00000001", tmp_path / "a.safetensors")
    export_safetensors(module, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert load_file(tmp_path / "a.safetensors").keys() == {*SHAPES, "head.weight"} - {"cache"}


@pytest.mark.parametrize("kept", [["embedding.weight"], ["head.weight"], ["embedding.weight", "head.weight"]])
def test_one_name_of_tied_parameters_is_enough(tmp_path, kept):
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    wanted = state["head.weight"]
    file = {name: value for name, value in state.items() if name in kept or "norm" in name}
    save_file(file, tmp_path / "model.safetensors")
    module = Cut(Tied(), 2)
    load_safetensors(module, tmp_path / "model.safetensors")
    assert torch.equal(module.full_state_dict()["head.weight"], wanted)


def test_tied_parameters_that_differ_in_the_file_are_refused(tmp_path):
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    state["head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'embedding.weight' and 'head.weight' differ, but the module ties them"):
        load_safetensors(Cut(Tied(), 2), tmp_path)


def test_all_that_does_not_fit_is_listed_and_nothing_loaded(tmp_path):
    state = {name: value.clone() for name, value in Tied().state_dict().items() if name != "head.weight"}
    state["norm.wait"] = state.pop("norm.weight")
    state["norm.bias"] = torch.zeros(5)
    state["embedding.weight"] = state["embedding.weight"].half()
    save_file(state, tmp_path / "model.safetensors")
    module = Cut(Tied(), 2)
    before = {name: value.clone() for name, value in module.full_state_dict().items()}
    with pytest.raises(CheckpointError) as refusal:
        load_safetensors(module, tmp_path)
    for line in (
        "missing 'norm.weight' (float32[4]). Did you mean 'norm.wait'?",
        "unexpected 'norm.wait' (float32[4]). Did you mean 'norm.weight'?",
        "'norm.bias' is float32[5], the module has float32[4].",
        "'embedding.weight' is float16[11, 4], the module has float32[11, 4].",
    ):
        assert line in str(refusal.value)
    assert all(torch.equal(value, before[name]) for name, value in module.full_state_dict().items())


def test_another_type_is_converted_when_asked_for(tmp_path):
    state = {name: value.clone() for name, value in Tied().state_dict().items() if name != "head.weight"}
    state["embedding.weight"] = state["embedding.weight"].bfloat16()
    save_file(state, tmp_path / "model.safetensors")
    module = Cut(Tied(), 2)
    load_safetensors(module, tmp_path, cast=True)
    assert torch.equal(module.full_state_dict()["embedding.weight"], state["embedding.weight"].float())


def test_files_that_are_none_are_named(tmp_path):
    module = Cut(Tied(), 2)
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors.index.json nor model.safetensors"):
        load_safetensors(module, tmp_path)
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=str(path)):
        load_safetensors(module, path)
    export_safetensors(module, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{path} is not a whole safetensors file"):
        load_safetensors(module, path)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=f"{index} is no index"):
            load_safetensors(module, tmp_path)
    export_safetensors(module, path)
    index.write_text(json.dumps({"weight_map": {"lost.weight": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names 'lost.weight' in model.safetensors, which does not hold it"):
        load_safetensors(module, tmp_path)


def test_export_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot write"):
        export_safetensors(Cut(Tied(), 2), tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_hugging_face_reads_what_we_write_and_we_read_its_shards(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    module = Cut(transformers.GPT2LMHeadModel(config), 3)
    load_safetensors(module, tmp_path / "theirs")
    ours = module.full_state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.state_dict().items())

    config.save_pretrained(tmp_path / "ours")
    export_safetensors(module, tmp_path / "ours" / "model.safetensors")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(read.state_dict()[name], value) for name, value in theirs.state_dict().items())
