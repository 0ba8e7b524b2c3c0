"""The page is whole: its figures are those of ``--json``, nothing is loaded, and a browser draws it without a word."""

import functools
import html.parser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import planner
from meshwright.errors import ConfigError
from meshwright.planner.explain import RunLength, found_document, page, what_if
from meshwright.planner.plans import MEMORY_CLASSES
from tests.planner.explain.found import found, subject, subject_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@functools.cache
def document():
    asked = what_if(subject_of, found())
    about = {"name": "llama-2-7b </script><b>", "num_parameters": 6_738_415_616, "global_batch": 64, "seq": 2048}
    return found_document(found(), model=about, what_ifs=asked, subject=subject(), length=RunLength(tokens=1e12))


class Elements(html.parser.HTMLParser):
    """Elements by id with their text, and everything that would be loaded."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.loaded, self.open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.loaded += [value for name in ("src", "href") if (value := known.get(name))]
        if tag not in ("meta", "link", "br"):
            self.open.append(known.get("id"))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        for name in filter(None, self.open):
            self.texts[name] = self.texts.get(name, "") + data


def test_the_page_carries_the_document_and_loads_nothing():
    pytest.importorskip("plotly")
    parsed = Elements(page(document()))
    assert json.loads(parsed.texts["plans"]) == json.loads(json.dumps(document()))
    assert parsed.loaded == ["data:,"]
    assert parsed.open == []


def test_the_document_is_plain_and_says_what_the_plans_say():
    whole = json.loads(json.dumps(document()))
    assert (whole["format"], whole["schema_version"]) == ("meshwright.plans", 1)
    for plan, entry in zip(found().plans, whole["plans"], strict=True):
        assert entry["time"]["step_time_s"] == plan.forecast.time.step_time_s
        assert entry["memory"]["needed_bytes"] == plan.needed_bytes
        ranks = entry["memory"]["ranks"]
        assert [rank["allocated_bytes"] for rank in ranks] == [each.allocated_bytes for each in plan.forecast.peaks]
        for rank in ranks:
            assert sum(rank["moments"][rank["moment"]].values()) == rank["allocated_bytes"]
    assert [plan["fits"] for plan in whole["too_large"]] == [False]
    assert max(event["end_s"] for event in whole["timeline"]["events"]) == whole["plans"][0]["time"]["step_time_s"]
    assert len(whole["what_if"]) == 7  # five circumstances, and two methods that a search uses only by name
    assert whole["differences"][0]["effects"]


def test_keys_are_those_that_the_guide_names():
    guide = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    best = document()["plans"][0]
    named = [*document(), *best, *best["time"], *best["memory"], *best["memory"]["ranks"][0], *best["traffic"][0]]
    named += [*document()["cluster"], *document()["timeline"], *document()["what_if"][0], *document()["differences"][0]]
    absent = [key for key in dict.fromkeys(named) if f"`{key}`" not in guide and f"`{key}[]`" not in guide]
    assert set(absent) <= {"format", "schema_version", "parts_s", "rank", "first", "second", "seconds"}, absent


def test_without_plotly_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=re.escape("meshwright[report]")):
        page(document())


def test_the_page_has_a_name_for_every_class_of_memory_on_a_device():
    script = (Path(planner.__file__).parent / "explain" / "page.js").read_text()
    classes = script.partition("const CLASSES = {")[2].partition("};")[0]
    on_device = [name for name, _ in MEMORY_CLASSES if not name.startswith(("host_", "disk_"))]
    assert [name for name in on_device if f"{name}: [" not in classes] == []


def beyond():
    """The document with what no plan in it has: too much host memory, and a class that the page has no name for."""
    whole = json.loads(json.dumps(document()))
    most = {"host_bytes": 3 * 2**40, "host_limit_bytes": 2**40}
    far = whole["plans"][-1] | {"fits": False, "memory": whole["plans"][-1]["memory"] | most, "against_limit": "far"}
    whole["too_large"].append(far)
    held = whole["plans"][0]["memory"]["ranks"][0]["moments"]["loss"]
    held |= {"updating": 2**30, "a_later_class": 2**30}
    return whole


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_it_without_an_error(tmp_path):
    pytest.importorskip("plotly")
    file = tmp_path / "page.html"
    file.write_text(page(beyond()))
    drawn = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
            "--virtual-time-budget=20000", f"--user-data-dir={tmp_path}/profile", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [line for line in drawn.stderr.splitlines() if "CONSOLE" in line] == []
    dom = drawn.stdout
    assert 'data-ready="yes"' in dom
    assert dom.count('class="main-svg"') >= 4
    texts = {name: re.sub(r"\s+", " ", text) for name, text in Elements(dom).texts.items() if name != "plans"}
    best = document()["plans"][0]
    assert f"{best['time']['step_time_s']:.2f} s" in texts["cards"]
    assert f"{100 * best['time']['mfu']:.1f} %" in texts["cards"]
    assert "host memory: 2048.0 GiB too much" in texts["ranking"]
    assert f"{best['run']['seconds'] / 86_400:.1f} days" in texts["cards"]
    assert f"{best['run']['seconds'] / 86_400:.1f} days" in texts["ranking"]
    assert "held while updating" in texts["memory"]
    assert "a_later_class" in texts["memory"]
    for entry in (*document()["plans"], *document()["too_large"]):
        assert entry["summary"] in texts["ranking"]
        assert f"{entry['time']['tokens_per_s']:,.0f}" in texts["ranking"]
    for entry in document()["what_if"]:
        assert entry["outcome"] in texts["whatif"]
    assert document()["differences"][0]["changes"][0] in texts["difference"]
