"""Text in examples/cpp, with a tokenizers library over the Python package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.examples.cpp_host import Host, answers_of, fails, ids_of, lines_of, rewritten, same
from tests.examples.test_cpp_host_requests import expected, random_request
from tests.support.editing import edit_json
from tests.support.toy_model import BOS, EOS, SPECIAL, VOCAB, Toy, byte_ids, byte_tokenizer, export
from topw_deploy.manifest import MANIFEST_NAME, describe_files, load_manifest, save_manifest
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow

TEXTS = ("a", "Größe", "日本語のテキスト", "😀 and 🏳️‍🌈", "  spaces\n\nand lines\t", "</s>", "x" * 50)


@pytest.fixture
def library(tokenizers_library: Path) -> list[object]:
    return ["--tokenizer-library", tokenizers_library]


def words_tokenizer() -> Tokenizer:
    """SentencePiece-like words that lose a leading space at the start, and bytes."""
    letters = [a + b for a in "abcdefghijkl" for b in "aeiou"]
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *[f"▁{letter}" for letter in letters], *names])}
    vocab = {token: i for token, i in vocab.items() if i < VOCAB}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


@pytest.mark.long
def test_a_prompt_is_tokenised_and_its_answer_is_text(
    host: Host, demo_export: Path, library: list[object], tmp_path: Path
) -> None:
    with TopWModel.from_pretrained(demo_export, provider="cpu", intra_op_num_threads=1) as model:
        for seed, prompt in enumerate(("class Path", "def größe(", "")):
            text = model.generate(prompt, seed=seed, lam=1.5, max_new_tokens=40).text
            given = [demo_export, *library, "--seed", seed, "--lam", 1.5, "--max-new-tokens", 40]
            assert host(*given, "--prompt", prompt).stdout == text + "\n"
            assert host(*given, stdin=prompt + "\n").stdout == text + "\n"
            assert host(*given, stdin=prompt + "\r\n").stdout == text + "\n"


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_random_requests_with_stop_strings_give_the_text_of_the_python_runtime(
    tokenizer: str, host: Host, toy: Toy, library: list[object], tmp_path: Path
) -> None:
    """Random tokens: most characters are unfinished or broken."""
    made = byte_tokenizer() if tokenizer == "bytes" else words_tokenizer()
    folder, rng = export(tmp_path / "export", toy, form="scatter", tokenizer=made), np.random.default_rng(5)
    letters, found, broken = [*"abcdefghijklmnopqrstuvwxyz", " ", "é", "�", "ab", "e c", "��"], 0, 0
    with TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1, sampler="graph") as model:
        for rows in (1, 6, 20):
            requests = [random_request(rng) for _ in range(rows)]
            for request in requests:
                if rng.random() < 0.7:
                    request["stop_strings"] = rng.choice(letters, rng.integers(1, 30)).tolist()
                if rng.random() < 0.3:
                    request["prompt"] = str(rng.choice(TEXTS))
            answers = answers_of(host(folder, "--batch", *library, stdin=lines_of(requests)))
            for request, answer in zip(requests, answers, strict=True):
                result = expected(model, request)
                assert same(answer, result), request
                found += isinstance(result.stop, str)
                broken += "�" in result.text
    assert found >= 5
    assert broken >= 5


def test_every_text_has_the_ids_of_the_python_runtime(
    host: Host, toy: Toy, library: list[object], tmp_path: Path
) -> None:
    folder = export(tmp_path / "export", toy, tokenizer=byte_tokenizer(bos=True))
    with TopWModel.from_pretrained(folder, provider="cpu", sampler="graph") as model:
        for text in TEXTS:
            for option, special in (([], True), (["--no-add-special-tokens"], False)):
                result = model.generate(text, seed=1, max_new_tokens=6, add_special_tokens=special)
                done = host(folder, *library, *option, "--json", "--seed", 1, "--max-new-tokens", 6, "--prompt", text)
                (answer,) = answers_of(done)
                assert same(answer, result), text
        assert model.tokenizer.encode("a") == [BOS, *byte_ids("a")]


def test_special_tokens_are_shown_on_request(host: Host, library: list[object], tmp_path: Path) -> None:
    toy = Toy.script([*byte_ids("a"), BOS, *byte_ids("b"), EOS], prompt_tokens=1)
    folder = export(tmp_path / "export", toy)
    assert host(folder, *library, 50).stdout == "ab\n"
    assert host(folder, *library, "--no-skip-special-tokens", 50).stdout == "a<s>b\n"


def test_a_stop_string_is_found_across_tokens_and_cut_away(host: Host, library: list[object], tmp_path: Path) -> None:
    toy = Toy.script(byte_ids("one, two. Größe three"), prompt_tokens=1)
    folder = export(tmp_path / "export", toy)
    given = [folder, *library, "--json", "--max-new-tokens", 23]
    for stops, text, stop in (
        (["o. G"], "one, tw", "o. G"),
        (["ö", "öß"], "one, two. Gr", "ö"),
        (["two.", "e, two.", "wo"], "one, t", "wo"),
        (["none", "three."], "one, two. Größe three", None),
    ):
        options = [word for name in stops for word in ("--stop", name)]
        (answer,) = answers_of(host(*given, *options, 50))
        assert (answer["text"], answer["stop"]) == (text, stop)
        assert answer["finish_reason"] == ("stop" if stop else "length")
    guarded = ["--min-new-tokens", 8, "--stop", "o"]
    assert answers_of(host(*given, *guarded, 50))[0]["text"] == "one, tw"
    assert answers_of(host(*given, "--min-new-tokens", 9, "--stop", "o", 50))[0]["text"] == "one, two. Größe three"


def test_training_settings_of_the_tokenizer_do_not_cut_or_pad_a_prompt(
    host: Host, toy: Toy, library: list[object], tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=16, pad_id=2, pad_token='<p"}{ad>')
    folder = export(tmp_path / "export", toy, tokenizer=tokenizer)
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert settings["truncation"]["max_length"] == 3
    assert settings["padding"]["pad_token"] == '<p"}{ad>'
    with TopWModel.from_pretrained(folder, provider="cpu", sampler="graph") as model:
        result = model.generate("six of", seed=1, max_new_tokens=5)
    given = ["--seed", 1, "--max-new-tokens", 5, "--json", "--prompt", "six of"]
    (answer,) = answers_of(host(folder, *library, *given))
    assert answer["prompt_tokens"] == 6
    assert same(answer, result)


def change_json(source: Path, target: Path, name: str, data: Any) -> Path:
    shutil.copytree(source, target)
    (target / name).write_text(json.dumps(data), encoding="utf-8")
    manifest = load_manifest(source)
    names = [path.name for path in target.iterdir() if path.name != MANIFEST_NAME]
    save_manifest(target, replace(manifest, files=describe_files(target, names)))
    return target


def test_the_tokenizers_bos_begins_an_empty_prompt_but_its_eos_ends_no_text(
    host: Host, library: list[object], tmp_path: Path
) -> None:
    toy = Toy.script([*byte_ids("ab"), EOS, *byte_ids("c")], prompt_tokens=1)
    silent = rewritten(export(tmp_path / "export", toy), tmp_path / "silent", lambda _: None, config={})
    for number, config in enumerate(
        ({"eos_token": "</s>", "bos_token": "<s>"}, {"eos_token": {"content": "</s>"}, "bos_token": {"content": "<s>"}})
    ):
        folder = change_json(silent, tmp_path / str(number), "tokenizer_config.json", config)
        assert ids_of(host(folder, "--max-new-tokens", 4, 50)) == [*byte_ids("ab"), EOS, *byte_ids("c")]
        for prompt in ([50], ["--prompt", ""]):
            (answer,) = answers_of(host(folder, *library, "--json", *prompt))
            assert (answer["text"][:3], answer["finish_reason"], answer["prompt_tokens"]) == ("abc", "length", 1)
    nothing = change_json(silent, tmp_path / "nothing", "tokenizer_config.json", {"eos_token": "no such token"})
    done = host(nothing, *library, "--max-new-tokens", 4, 50)
    assert (done.stdout, done.stderr) == ("abc\n", "note: the model states no end of sequence; see --eos\n")
    fails(host(nothing, *library, "--prompt", ""), 1, "the prompt is empty")


def test_stop_strings_of_the_model_need_a_tokenizer(host: Host, library: list[object], tmp_path: Path) -> None:
    toy = Toy.script([*byte_ids("one two"), EOS], prompt_tokens=1)
    folder = export(tmp_path / "export", toy, generation_config={"stop_strings": " t", "eos_token_id": EOS})
    assert host(folder, *library, 50).stdout == "one\n"
    done = host(folder, 50)
    assert ids_of(done) == [*byte_ids("one two"), EOS]
    assert done.stderr == "note: generation_config.json has stop_strings, which have no effect without " \
        "--tokenizer-library\n"  # fmt: skip


def test_a_library_without_the_interface_is_refused(
    host: Host, ort_library: Path, folders: dict[str, Path], library: list[object], tmp_path: Path
) -> None:
    fails(host(folders["concat"], "--tokenizer-library", "/nowhere.so", 50), 1, "/nowhere.so")
    fails(host(folders["concat"], "--tokenizer-library", ort_library, 50), 1, "has no tokenizers_new_from_str")
    broken = change_json(folders["concat"], tmp_path / "broken", "tokenizer.json", {"model": {"type": "none"}})
    fails(host(broken, *library, 50), 1, "tokenizer.json cannot be read")
    silent = rewritten(folders["concat"], tmp_path / "silent", lambda _: None)
    (silent / "tokenizer.json").unlink()
    edit_json(silent / MANIFEST_NAME, lambda manifest: manifest["files"].pop("tokenizer.json"))
    fails(host(silent, *library, 50), 1, "has no tokenizer.json")


@pytest.mark.parametrize("prompt", [b"\xff", b"a\xc3", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80"])
def test_a_prompt_that_is_not_utf8_is_refused(
    prompt: bytes, host: Host, folders: dict[str, Path], library: list[object]
) -> None:
    fails(host(folders["concat"], *library, stdin=prompt), 1, "the prompt is not UTF-8")
    fails(host(folders["concat"], *library, "--batch", stdin=b'{"prompt": "' + prompt + b'"}'), 1, "request 0 is not")
