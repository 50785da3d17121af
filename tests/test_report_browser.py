"""Reports in a real browser: what a reader clicks, searches and reads, without a word on the
console and without a page that is wider than the screen.

`pip install "onnx-fuse[browser]"` brings what drives the browser; the browser itself is Chromium,
of the system (`apt-get install chromium`) or Playwright's own. Without one these tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ENCODER

from onnx_fuse import cli as command
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.report import graph, page, training
from onnx_fuse.report.page import Overview, Page, Section

playwright = pytest.importorskip("playwright.sync_api")

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1280, 420)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=path, args=_FLAGS)
        except playwright.Error as error:
            pytest.skip(f"no Chromium starts here: {error}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each command that draws something."""
    folder = tmp_path_factory.mktemp("reports")
    relu = "g (float[N,4] x) => (float[N,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> "
    save(text_model(relu + "{ m = MatMul(x, w) y = Tanh(m) }"), folder / "small.onnx")
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(64, 4)).astype(np.float32), rng.integers(0, 3, 64)
    np.savez(folder / "data.npz", x=x, labels=labels)
    train = ["train", folder / "small.onnx", "--data", folder / "data.npz", "--loss",
             "cross_entropy", "--epochs", 12, "--val", folder / "data.npz"]  # fmt: skip
    lines: dict[str, list[object]] = {
        "optimize": ["optimize", ENCODER, "-o", folder / "fused.onnx", "--target", "h200"],
        "validate": ["validate", ENCODER],
        "run": ["run", ENCODER, "--profile", "--json", folder / "run.json"],
        "bench": ["bench", ENCODER, "--repeat", 3],
        "train": [*train, "--json", folder / "a.json", "-o", folder / "a.onnx"],
        "compare": ["compare", folder / "a.json", folder / "a.json"],
        "inspect": ["inspect", ENCODER],
    }
    found = {}
    for name, line in lines.items():
        found[name] = folder / f"{name}.html"
        arguments = [str(part) for part in (*line, "--html", found[name])]
        assert command.run_command(command.expand(arguments)) == 0
    return found


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """`opened(path, width=420, dark=True)` is the page of a file, which must say no error.

    Its sections are open unless it is `folded`.
    """
    contexts, said = [], list[str]()

    def open_page(
        path: Path, *, width: int = 1280, dark: bool = False, folded: bool = False
    ) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        found = context.new_page()
        found.on("console", lambda line: said.append(line.text))
        found.on("pageerror", lambda error: said.append(str(error)))
        found.goto(path.as_uri())
        everything = found.get_by_role("button", name="Open all")
        if everything.count() and not folded:
            everything.click()
        return found

    yield open_page
    for context in contexts:
        context.close()
    assert not said


COLLISIONS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const words = [...svg.querySelectorAll("text")]
      .map((t) => [t.textContent, t.getBoundingClientRect()]).filter(([, box]) => box.width);
    words.forEach(([text, a], i) => {
      if (a.right > innerWidth + 1 || a.left < -1) found.push(`${text} is cut off`);
      for (const [other, b] of words.slice(i + 1)) {
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
          && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3) {
          found.push(`${text} on ${other}`);
        }
      }
    });
  }
  return found;
}"""
NAMES = ("optimize", "validate", "run", "bench", "train", "compare", "inspect")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_the_screen_in_light_and_dark(
    opened: Open, reports: dict[str, Path], name: str, width: int
) -> None:
    papers = set()
    for dark in (False, True):
        shown = opened(reports[name], width=width, dark=dark)
        shown.wait_for_function("document.readyState === 'complete'")
        assert shown.evaluate(COLLISIONS) == []
        wide = shown.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
        papers.add(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert shown.locator("h1").inner_text()
        for svg in shown.locator("figure.view svg").all():
            assert svg.get_attribute("aria-label")
    assert len(papers) == 2


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_the_summary_fits_one_screen_and_links_open_sections(
    opened: Open, reports: dict[str, Path], name: str, width: int
) -> None:
    shown = opened(reports[name], width=width, folded=True)
    nav = shown.locator("nav")
    assert nav.bounding_box()["y"] < 600  # after verdict, figures and next steps
    last = shown.locator("main section > details").last
    nav.locator("a").last.click()
    assert last.get_attribute("open") is not None
    shown.mouse.wheel(0, 10_000)
    shown.wait_for_timeout(100)
    assert nav.bounding_box()["y"] >= 0  # it stays


def test_a_graph_fills_the_screen_and_leaves_red_to_failures(
    opened: Open, reports: dict[str, Path]
) -> None:
    shown = opened(reports["optimize"])
    hues = shown.evaluate("[...document.querySelector('figure.graph').view.hues.values()]")
    assert len(set(hues)) == len(hues) > 3
    assert all(40 <= hue <= 320 for hue in hues)
    canvas = shown.locator("figure.graph canvas").first
    before = canvas.bounding_box()["height"]
    shown.get_by_role("button", name="Full screen").click()
    shown.wait_for_function("document.fullscreenElement !== null")
    assert canvas.bounding_box()["height"] > before


def test_search_and_a_click_show_a_node_and_what_it_was_made_of(
    opened: Open, reports: dict[str, Path]
) -> None:
    shown = opened(reports["optimize"])
    shown.get_by_placeholder("Search nodes").fill("LayerNormGemm")
    shown.locator(".found button").first.click()
    panel = shown.locator(".panel")
    assert panel.locator("h3").inner_text().startswith("LayerNormGemm")
    for word in ("kernel", "share of the floor", "error", "reads", "computes", "made of"):
        assert word in panel.inner_text()
    panel.locator("summary").click()
    assert "LayerNormalization" in panel.locator("pre").inner_text()
    chip = shown.locator("button.chip").first
    chip.click()
    assert chip.get_attribute("aria-pressed") == "true"
    shown.get_by_label("Colour by").select_option("error")


def test_a_click_on_a_box_chooses_its_node(opened: Open, reports: dict[str, Path]) -> None:
    shown = opened(reports["optimize"])
    canvas = shown.locator("canvas").last
    canvas.scroll_into_view_if_needed()
    place = shown.evaluate(
        """() => {
          const board = document.querySelector("figure.graph").view.boards[1];
          const i = board.order[0];
          return {x: (board.data.x[i] - board.x) * board.scale,
                  y: (board.data.y[i] + 15 - board.y) * board.scale};
        }"""
    )
    canvas.click(position=place)
    assert "read by" in shown.locator(".panel").inner_text()


def test_the_graph_is_walked_by_the_keyboard(opened: Open, reports: dict[str, Path]) -> None:
    shown = opened(reports["optimize"])
    shown.locator("canvas").last.focus()
    titles = []
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Enter"):
        shown.keyboard.press(key)
        titles.append(shown.locator(".panel h3").inner_text())
    assert titles[0] == "input"
    assert len(set(titles)) > 1
    assert shown.evaluate("document.activeElement.className") == "panel"


def test_axes_change_and_the_points_of_a_chart_are_read_aloud(
    opened: Open, reports: dict[str, Path]
) -> None:
    shown = opened(reports["train"])
    chart = shown.locator("figure.chart").first
    log = chart.get_by_role("button", name="y log")
    log.click()
    assert log.get_attribute("aria-pressed") == "true"
    svg = chart.locator("svg")
    svg.focus()
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("ArrowRight")
    assert "step" in chart.locator("[aria-live]").inner_text()
    svg.hover(position={"x": 300, "y": 100})
    tip, drawing = chart.locator(".tip").bounding_box(), svg.bounding_box()
    assert drawing["y"] < tip["y"] < drawing["y"] + drawing["height"]


def test_a_live_page_loads_itself_again_and_keeps_what_was_chosen(
    opened: Open, tmp_path: Path
) -> None:
    path = tmp_path / "live.html"

    def write(losses: list[float], refresh: float) -> None:
        sections = training.sections({"": {"losses": losses}})
        page.write(path, Page("m", "", sections, Overview(f"{len(losses)} steps"), refresh=refresh))

    def log() -> str | None:
        return shown.get_by_role("button", name="y log").get_attribute("aria-pressed")

    write([2.0, 1.0], 0.0)
    shown = opened(path)
    assert not shown.get_by_role("button", name="Refresh").count()
    shown.get_by_role("button", name="y log").click()
    write([2.0, 1.0, 0.5], 0.3)
    shown.reload()
    write([2.0, 1.0, 0.5, 0.2], 0.3)
    shown.get_by_text("4 steps").wait_for()
    assert log() == "true"
    refresh = shown.get_by_role("button", name="Refresh")
    while refresh.get_attribute("aria-pressed") == "true":  # a click may meet a page that goes
        refresh.click()
    write([2.0, 1.0, 0.5, 0.2, 0.1], 0.3)
    shown.wait_for_timeout(900)
    assert shown.get_by_text("4 steps").is_visible()
    shown.reload()
    assert shown.get_by_text("5 steps").is_visible()
    assert (log(), refresh.get_attribute("aria-pressed")) == ("true", "false")


def test_a_timeline_zooms_and_bars_open(opened: Open, reports: dict[str, Path]) -> None:
    shown = opened(reports["run"])
    plane = shown.locator("figure.plane").first
    count = plane.locator("svg rect").count()
    for _ in range(3):
        plane.get_by_role("button", name="Zoom in").click()
    assert plane.locator("svg rect").count() < count
    plane.get_by_role("button", name="All").click()
    assert plane.locator("svg rect").count() == count
    bars = shown.locator("figure.bars").last
    few = bars.locator("tbody tr").count()
    bars.get_by_role("button", name="Show all").click()
    assert bars.locator("tbody tr").count() > few


def test_tables_are_sorted(opened: Open, reports: dict[str, Path]) -> None:
    shown = opened(reports["train"])
    table = shown.locator("section#by-epoch table")
    head = table.locator("th").first
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    cells = table.locator("tbody tr td:first-child").all_inner_texts()
    assert [int(cell) for cell in cells] == sorted(map(int, cells), reverse=True)


def test_three_thousand_nodes_are_drawn_and_found(opened: Open, tmp_path: Path) -> None:
    lines = "\n".join(
        f"v{i + 1} = " + (f"Relu(v{i})" if i % 9 else f"Add(v{i}, v{max(0, i - 8)})")
        for i in range(3000)
    )
    model = text_model(f"g (float[N] v0) => (float[N] v3000) {{ {lines} }}")
    path = tmp_path / "big.html"
    page.write(path, Page("big", "", [Section("Graph", [graph.view([graph.Drawn("g", model)])])]))
    assert path.stat().st_size < 1 << 20
    shown = opened(path)
    shown.get_by_placeholder("Search nodes").fill("v2998")
    shown.locator(".found button").first.click()
    assert "v2998" in shown.locator(".panel").inner_text()
    shown.get_by_role("button", name="All", exact=True).click()
    ink = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 0)"
    shown.wait_for_function(f"({ink})(document.querySelector('canvas'))")


def test_a_page_can_be_printed(opened: Open, reports: dict[str, Path], tmp_path: Path) -> None:
    shown = opened(reports["validate"], dark=True)
    shown.pdf(path=tmp_path / "v.pdf")
    assert (tmp_path / "v.pdf").stat().st_size > 10_000
