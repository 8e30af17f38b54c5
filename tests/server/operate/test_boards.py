"""docs/deploy/grafana.json and alerts.yaml ask for metrics that there are, by their labels."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from tests.house.tree import ROOT
from tests.server.test_metrics_page import PAGE, families

DEPLOY = ROOT / "docs" / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
RULES = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
OF_SCRAPE = {"job", "instance", "le"}
NAME = re.compile(r"\b((?:ess|process)_[a-z_]+)")
__all__ = ["families"]


@pytest.fixture(scope="module")
def labels(families: list[Metric]) -> dict[str, set[str]]:
    named: dict[str, set[str]] = defaultdict(set)
    for family in families:
        for sample in family.samples:
            named[sample.name] |= {*sample.labels, *OF_SCRAPE}
    return named


def check(expression: str, shown: str, labels: dict[str, set[str]]) -> None:
    names = NAME.findall(expression)
    assert names
    assert {*names} <= labels.keys(), expression
    asked = set(re.findall(r"(\w+)=~?\"", expression))
    for listed in re.findall(r"by \(([^)]*)\)", expression):
        asked |= set(re.split(", *", listed))
    asked |= set(re.findall(r"{{ ?(?:\$labels\.)?(\w+) ?}}", shown))
    assert asked <= set.union(*(labels[name] for name in names)), (expression, shown)
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing), expression


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:60])
def test_a_panel_shows_what_there_is(target: dict[str, str], labels: dict[str, set[str]]):
    check(target["expr"], target["legendFormat"], labels)
    by = re.match(r"(?:sum|max) by \(([^)]*)\)", target["expr"])
    shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert shown <= set(re.split(", *", by[1])) if by else True, "else all lines have one name"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_watches_what_there_is(rule: dict[str, Any], labels: dict[str, set[str]]):
    check(rule["expr"], rule["annotations"]["summary"], labels)


def test_there_is_a_rule_for_each_line_of_the_page():
    _, _, behind = PAGE.read_text().partition("## What to be woken for\n")
    lines = [line for line in behind.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    said = [NAME.findall(line.split("|")[1])[0] for line in lines]
    assert sorted(said) == sorted(NAME.findall(rule["expr"])[0] for rule in RULES)


def test_the_board_can_be_laid_out():
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers) > 20
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(BOARD["panels"])))
    assert used == names
