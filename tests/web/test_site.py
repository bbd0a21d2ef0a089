"""`topw web` writes whole sites, and refuses what a browser cannot run."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tests.support.browser import FOLDER, needs_browser
from tests.support.toy_model import Toy, export, export_sampler
from topw_deploy.cli.main import run, topw
from topw_deploy.errors import ExportError, ManifestError, ParameterError, UnsupportedModelError
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, describe_files, load_decoder_manifest, save_manifest
from topw_deploy.web import check_runs, notes, site, write_site

ROOT = Path(__file__).parents[2]
OWN = ROOT / "src" / "topw_deploy" / "web" / "site"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("model") / "out", Toy.random(1))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node_modules with other contents under the fixed names and hashes."""
    files = []
    for file in site.FILES:
        path = tmp_path / "packages" / "node_modules" / file.package / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.path.encode())
        files.append(dataclasses.replace(file, integrity=site.integrity(file.path.encode())))
    monkeypatch.setattr(site, "FILES", tuple(files))
    return tmp_path / "packages"


def listed(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def policy(folder: Path) -> str:
    found = re.search(r'Content-Security-Policy" content="([^"]+)"', (folder / "index.html").read_text("utf-8"))
    assert found is not None
    return found[1]


def test_a_site_has_the_page_the_library_and_the_model(model: Path, tmp_path: Path) -> None:
    made = write_site(model, tmp_path / "site")
    own = listed(OWN)
    names = listed(tmp_path / "site")
    assert names == own | {"style.css", "topw_site.json"} | {f"model/{name}" for name in listed(model)}
    assert (tmp_path / "site" / "model" / "model.onnx").read_bytes() == (model / "model.onnx").read_bytes()
    assert load_decoder_manifest(tmp_path / "site" / "model") == load_decoder_manifest(model)
    assert made.bytes == sum((tmp_path / "site" / name).stat().st_size for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["site"], "nothing else is left"


def test_libraries_come_from_the_cdn_with_their_hashes(model: Path, tmp_path: Path) -> None:
    assert write_site(model, tmp_path / "site").outside
    about = json.loads((tmp_path / "site" / "topw_site.json").read_text("utf-8"))
    files = [about["libraries"]["onnxruntime"]["script"], about["libraries"]["onnxruntime"]["wasm"]]
    files.append(about["libraries"]["tokenizers"]["script"])
    for file in files:
        assert re.fullmatch(r"https://cdn\.jsdelivr\.net/npm/[@a-z/-]+@\d+\.\d+\.\d+/dist/[\w.-]+", file["url"])
        assert re.fullmatch(r"sha384-[A-Za-z0-9+/]{64}", file["integrity"])
    assert "connect-src &#x27;self&#x27; https://cdn.jsdelivr.net;" in policy(tmp_path / "site")


def test_a_site_with_copies_names_no_other_host(model: Path, packages: Path, tmp_path: Path) -> None:
    for number, runtime in enumerate((packages, packages / "node_modules")):
        folder = tmp_path / f"site-{number}"
        assert not write_site(model, folder, runtime=runtime).outside
        assert (folder / "runtime" / "ort-wasm-simd-threaded.wasm").read_bytes() == site.WASM.path.encode()
        assert "https" not in policy(folder)
        code = [folder / name for name in listed(folder) if name.endswith((".html", ".js", ".css", "topw_site.json"))]
        assert not [path for path in code if re.search(r"https?://(?!www\.w3\.org/2000/svg)", path.read_text("utf-8"))]


def test_packages_of_other_versions_are_refused(model: Path, packages: Path, tmp_path: Path) -> None:
    script = packages / "node_modules" / site.SCRIPT.package / site.SCRIPT.path
    script.write_bytes(b"another version")
    with pytest.raises(
        ParameterError, match=r"is not the file of onnxruntime-web .*; run `npm install .*onnxruntime-w"
    ):
        write_site(model, tmp_path / "site", runtime=packages)
    script.unlink()
    with pytest.raises(ParameterError, match="cannot be read"):
        write_site(model, tmp_path / "site", runtime=packages)
    assert not (tmp_path / "site").exists()


def test_the_packages_that_tests_and_examples_install_are_those_of_the_site() -> None:
    for place in ("tests/browser", "examples/node"):
        named = json.loads((ROOT / place / "package.json").read_text("utf-8"))["dependencies"]
        wanted = {file.package: file.version for file in site.FILES}
        if place == "examples/node":
            wanted = {name.replace("-web", "-node"): version for name, version in wanted.items()}
        assert wanted.items() <= named.items()


def test_the_hashes_are_those_of_the_installed_packages() -> None:
    needs_browser()
    assert [file for file, _ in site.read_packages(FOLDER)] == list(site.FILES)


def test_every_file_of_the_site_is_in_a_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    patterns = [p.removeprefix("web/site/") for p in data["topw_deploy"] if p.startswith("web/site/")]
    for name in listed(OWN):
        assert any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns), name


def test_titles_and_prompts_are_text_in_the_page(model: Path, tmp_path: Path) -> None:
    write_site(model, tmp_path / "site", title="@PROMPT@ <b>", prompt='</textarea><script src="x">')
    page = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "<title>@PROMPT@ &lt;b&gt;</title>" in page
    assert "&lt;/textarea&gt;&lt;script src=&quot;x&quot;&gt;</textarea>" in page
    assert page.count("<script") == 1


def test_only_sites_are_overwritten_and_only_on_request(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    write_site(model, folder)  # empty
    with pytest.raises(ExportError, match="is not empty; choose another folder or give --overwrite"):
        write_site(model, folder)
    (folder / "old").touch()
    write_site(model, folder, overwrite=True)
    assert not (folder / "old").exists()
    (folder / "topw_site.json").unlink()
    with pytest.raises(ExportError, match=r"not a site of `topw web` \(no topw_site\.json\)"):
        write_site(model, folder, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="is not a folder"):
        write_site(model, tmp_path / "file", overwrite=True)


def test_a_changed_weight_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(1))
    data = bytearray((folder / "model.onnx").read_bytes())
    data[-1] ^= 1
    (folder / "model.onnx").write_bytes(data)
    with pytest.raises(ManifestError, match=r"model\.onnx has SHA-256"):
        write_site(folder, tmp_path / "site")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_size_counts_every_file_that_the_graph_names(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(1))
    manifest, graph = load_decoder_manifest(folder), onnx.load(folder / "model.onnx")
    graph.graph.initializer[0].name, long = "a" * 200, graph.graph.initializer[0].name
    for node in graph.graph.node:
        node.input[:] = ["a" * 200 if name == long else name for name in node.input]
    onnx.save(graph, folder / "model.onnx", save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    names = sorted(listed(folder) - {MANIFEST_NAME})
    save_manifest(folder, replace(manifest, files=describe_files(folder, names)))
    weights = [name for name in names if not name.endswith(".json")]
    assert len(weights) > 3
    assert "a" * 200 in weights
    assert write_site(folder, tmp_path / "site").model_bytes == sum((folder / name).stat().st_size for name in weights)


def changed(manifest: DecoderManifest, **decoder: Any) -> DecoderManifest:
    return replace(manifest, decoder=replace(manifest.decoder, **decoder))


def test_what_a_browser_cannot_run_is_refused(model: Path, tmp_path: Path) -> None:
    manifest = load_decoder_manifest(model)
    check_runs(manifest, model)
    states = tuple(replace(state, dtype="bfloat16") for state in manifest.decoder.states)
    large = {name: replace(entry, size=2_000_000_001) for name, entry in manifest.files.items() if name == "model.onnx"}
    logits = replace(manifest.outputs[0], name="logits")
    for wrong, message in (
        (changed(manifest, states=states), "element type bfloat16"),
        (changed(manifest, least_onnxruntime="1.31"), r"needs onnxruntime 1\.31, but the page has .*1\.30"),
        (replace(manifest, files={**manifest.files, **large}), r"has 2\.0 GB of weights, but .* at most 2\.0 GB"),
        (changed(manifest, weights={"float16": 1_999_999_999}), r"has 2\.0 GB of weights, as float32, but"),
        (replace(manifest, files={"model.onnx": manifest.files["model.onnx"]}), r"no tokenizer\.json"),
        (
            replace(manifest, source={"route": "import"}, outputs=(*manifest.outputs, logits)),
            "imported decoder with logits",
        ),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            check_runs(wrong, model)
    with pytest.raises(ManifestError, match="a sampler without a decoder"):
        write_site(export_sampler(tmp_path / "sampler", Toy.random(1)), tmp_path / "site")


def test_notes_say_that_packed_weights_are_slow_and_give_other_tokens(model: Path) -> None:
    manifest = load_decoder_manifest(model)
    assert notes(manifest) == []
    rounded = notes(changed(manifest, quantisation={"bits": 4, "accuracy_level": 4}))
    exact = notes(changed(manifest, quantisation={"bits": 4, "accuracy_level": 1}))
    assert (len(rounded), exact) == (2, rounded[:1])
    assert "packed weights" in notes(changed(manifest, weights={"uint8": 3, "float": 2}))[0]


def invoke(*words: object) -> Result:
    return CliRunner().invoke(topw, [str(word) for word in words], catch_exceptions=False)


def test_the_command_prints_the_folder_and_how_to_serve_it(model: Path, packages: Path, tmp_path: Path) -> None:
    result = invoke("web", model, tmp_path / "site", "--runtime", packages, "--title", "Toy")
    assert result.stdout == f"{tmp_path / 'site'}\n"
    assert f"python -m http.server -d {tmp_path / 'site'}" in result.stderr
    assert "Cross-Origin-Embedder-Policy: require-corp" in result.stderr
    report = json.loads(invoke("web", model, tmp_path / "site", "--overwrite", "--json").stdout)
    assert (report["folder"], report["outside"]) == (str(tmp_path / "site"), True)


def test_a_wrong_runtime_is_a_usage_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["web", str(model), str(tmp_path / "site"), "--runtime", str(tmp_path)]
    assert run(topw, "topw", "TOPW", words) == 2
    assert "--runtime is" in capsys.readouterr().err
