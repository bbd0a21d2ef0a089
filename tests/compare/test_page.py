"""The page is complete, has no scripts or links, and escapes whatever a model writes."""

from __future__ import annotations

from html.parser import HTMLParser

from topw_deploy.runtime.rule_settings import RuleSetting
from topw_lab.compare.comparison import TEXT_METRICS, Sample
from topw_lab.compare.page import page

from .conftest import comparison, sample

VOID = {"meta", "br", "input", "img", "link"}
KNOWN = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h4", "p", "div", "small", "table", "tr", "th", "td",
    "dl", "dt", "dd", "bdi", "details", "summary",
}  # fmt: skip
HOSTILE = (
    "</script><script>alert(1)</script></div></title><img src=x onerror=\"alert(2)\"> & &lt; 'q' \x1b[2J\u202e\x00 é"
)
SHOWN = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace("\x00", "\\x00")


class Reader(HTMLParser):
    """Collects elements and their text; checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [data for inside, data in self.texts if inside == tag]


def page_text(text: str = "plain text", prompt: str = "one", folder: str = "out") -> str:
    def samples(rule: RuleSetting, temperature: float, place: int) -> list[Sample]:
        name = f"{text} {rule.label} {temperature} {place}"
        return [sample(f"{name} {number}", (1, 2, 3, 4, 5)) for number in range(2)]

    rules = "top_w,top_w:preset=lively,none"
    compared = comparison(samples, prompts=(prompt, "two"), rules=rules, folder=folder)
    return page(compared)


def test_generated_texts_prompts_and_names_are_escaped() -> None:
    read = Reader(page_text(HOSTILE, HOSTILE, f"/tmp/{HOSTILE.replace('/', '').replace(chr(0), '')}"))
    assert {tag for tag, _ in read.tags} <= KNOWN
    assert f"{SHOWN} none 2.0 1 1" in read.of("div")
    assert SHOWN in read.of("bdi")
    assert "alert(1)" in read.of("h1")[0]


def test_every_text_stands_under_its_rule_with_its_temperature() -> None:
    read = Reader(page_text())
    texts = [text for text in read.of("div") if text.startswith("plain text")]
    rules = ("top_w", "top_w preset=lively", "none")
    assert texts == [
        f"plain text {rule} {temperature} {place} {number}"
        for place in (0, 1) for rule in rules for temperature in (0.5, 2.0) for number in (0, 1)
    ]  # fmt: skip
    captions = [text.split(":")[0] for text in read.of("small") if text.startswith("T = ")]
    assert captions == ["T = 0.5", "T = 0.5", "T = 2", "T = 2"] * 6


def test_the_page_has_a_definition_of_every_metric_and_a_row_per_cell() -> None:
    read = Reader(page_text())
    titles = [metric.title for metric in TEXT_METRICS if metric.name != "accuracy"]
    assert read.of("dt") == titles
    rows = [attributes for tag, attributes in read.tags if tag == "tr"]
    assert len(rows) == 1 + 2 * 3


def test_the_table_shows_intervals_where_prompts_differ() -> None:
    compared = comparison(lambda rule, temperature, place: [sample(surprisal=2.0 + 2.0 * place)], temperatures=(1.0,))
    shown = Reader(page(compared)).of("small")
    # Resamples of two prompts have the mean surprisals 1, 1.5 or 2 per token.
    assert [text for text in shown if " to " in text] == ["2.72 to 7.39"] * 2
