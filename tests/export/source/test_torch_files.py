"""PyTorch's weight files are read without loading them, and never run code."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import export, make_model, write_tokenizer
from topw_deploy.errors import SourceError
from topw_deploy.export.sampler_only import embeddings_of_folder
from topw_deploy.export.source.checkpoint import UnreadTensor, load_reference, load_unread
from topw_deploy.export.source.files import stored_tensors

Tensors = dict[str, torch.Tensor]


def write_checkpoint(folder: Path, parts: int) -> Tensors:
    """A tied Llama in `parts` files, with an index if there are several."""
    model = make_model("llama_tied")
    model.config.save_pretrained(folder)
    write_tokenizer(folder)
    tensors = {name: value.bfloat16() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    if parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    files = {name: f"pytorch_model-{place % parts + 1:05}-of-{parts:05}.bin" for place, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tensors


@pytest.mark.parametrize("parts", [1, 3])
def test_weights_stay_in_their_files(parts: int, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, parts)
    model, notices, _ = load_unread(tmp_path, "float32")
    assert notices == []
    for name, tensor in tensors.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, UnreadTensor)
        assert weight.file is not None
        assert torch.equal(weight.values(), tensor.float())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loaded = load_reference(tmp_path, "float32")
    assert torch.equal(loaded.lm_head.weight, tensors["model.embed_tokens.weight"].float())


def test_the_embedding_table_is_found_in_pytorchs_files(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, 3)
    table = embeddings_of_folder(tmp_path)
    assert torch.equal(torch.from_numpy(table.astype("float32")), tensors["model.embed_tokens.weight"].float())


def test_tensors_that_share_storage_are_found_in_it(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    torch.save({"whole": whole, "rows": whole[1:3], "number": torch.tensor(7)}, tmp_path / "pytorch_model.bin")
    found = {name: UnreadTensor.of(stored).values() for name, stored in stored_tensors(tmp_path).items()}
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["rows"], whole[1:3])
    assert found["number"] == 7


class Code:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


def test_code_in_a_file_is_refused_and_does_not_run(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, 1)
    ran = tmp_path / "ran"
    torch.save({**tensors, "code": Code(ran)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin holds more than tensors.* convert .* to safetensors"):
        stored_tensors(tmp_path)
    with pytest.raises(SourceError, match="holds more than tensors"):
        load_unread(tmp_path, "float32")
    assert not ran.exists()
    pickle.loads(pickle.dumps(Code(ran)))  # it would have
    assert ran.exists()


def _compress(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def _mark_big_endian(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b"little") == 1
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else record)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "compressed": (_compress, r"compressed records \(.*\); load and save"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "or is damaged"),
    "a list": (lambda path: torch.save([torch.zeros(2)], path), "holds a list, not tensors by name"),
    "complex": (lambda path: torch.save({"w": torch.zeros(2, dtype=torch.complex64)}, path), "w in type .*complex64"),
}


@pytest.mark.parametrize("how", WRONG)
def test_other_files_are_refused_with_the_reason(how: str, tmp_path: Path) -> None:
    change, words = WRONG[how]
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(2)}, file)
    change(file)
    with pytest.raises(SourceError, match=words):
        stored_tensors(tmp_path)


def test_tensors_in_other_layouts_and_byte_orders_are_read(tmp_path: Path) -> None:
    file, w = tmp_path / "pytorch_model.bin", torch.arange(6.0).reshape(2, 3)
    torch.save({"w": w.T}, file)
    assert stored_tensors(tmp_path)["w"].array().tolist() == w.T.tolist()
    torch.save({"w": w}, file)
    _mark_big_endian(file)
    assert stored_tensors(tmp_path)["w"].array().tobytes() == w.numpy().byteswap().tobytes()


def test_an_index_that_names_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    index = tmp_path / "pytorch_model.bin.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["other.weight"] = "pytorch_model-00001-of-00002.bin"
    index.write_text(json.dumps(data))
    with pytest.raises(SourceError, match=r"pytorch_model-00001-of-00002\.bin lacks the tensor other\.weight"):
        stored_tensors(tmp_path)


def test_a_file_of_an_old_pytorch_is_read(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, 1)
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    model = load_unread(tmp_path, "float32")[0]
    assert torch.equal(model.lm_head.weight.values(), tensors["model.embed_tokens.weight"].float())  # type: ignore[operator]
    assert torch.equal(load_reference(tmp_path, "float32").lm_head.weight, tensors["model.embed_tokens.weight"].float())


@pytest.mark.parametrize(
    ("content", "words"), [({"epoch": 3}, "epoch of type int"), ({"model": {}}, "model of type dict")]
)
def test_other_values_beside_tensors_are_named(content: dict[str, object], words: str, tmp_path: Path) -> None:
    """A checkpoint of a training program, of which transformers would read a part."""
    tensors = {**write_checkpoint(tmp_path, 1), **content}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match=f"holds {words} beside tensors"):
        load_unread(tmp_path, "float32")


@pytest.mark.slow
def test_a_checkpoint_in_several_files_is_exported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", 3)
    report = export(tmp_path / "model", tmp_path / "out", verify=True)
    assert report.verification is not None
    assert report.verification.status == "passed"
