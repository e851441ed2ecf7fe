"""Report of a drill as a JUnit file, which CI servers show: a case for each hazard."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from everstep.drill.report import DrillReport, Ordeal

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OUTCOMES = {"differs": "failure", "failed": "failure"}


def write_junit(file: Path, script: str, found: DrillReport | str) -> None:
    """Write the file.

    Args:
        found: the report, or the reason why there is none: an error of the suite's first case.
    """
    suite = ElementTree.Element("testsuite", name=f"everstep drill {_text(script)}")
    undisturbed = _case(suite, script, "two undisturbed runs", 0.0)
    if isinstance(found, str):
        _add(undisturbed, "error", found)
    else:
        if found.nondeterminism is not None:
            _add(undisturbed, "failure", found.verdict())
        _add_ordeals(suite, script, found)
    cases = list(suite)
    suite.set("tests", str(len(cases)))
    for outcome, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(outcome) is not None for case in cases)))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    ElementTree.ElementTree(suites).write(file, encoding="utf-8", xml_declaration=True)


def _add_ordeals(suite: ElementTree.Element, script: str, report: DrillReport) -> None:
    turns: Counter[str] = Counter()
    for one in report.ordeals:
        turns[one.hazard] += 1
        number = f" {turns[one.hazard]}" if turns[one.hazard] > 1 else ""
        seconds = sum(start.seconds for start in one.starts)
        case = _case(suite, script, one.hazard + number, seconds)
        if one.verdict != "exact":
            _add(case, _OUTCOMES.get(one.verdict, "skipped"), _said(one))


def _said(one: Ordeal) -> str:
    if one.divergence is not None:
        first = one.divergence
        values = f"{first.expected} undisturbed, {first.found} here"
        return f"struck {one.struck}; {first}: {values}\nlikely: {first.cause}"
    return f"{one.verdict}: {one.message}" if one.message else one.verdict


def _case(suite: ElementTree.Element, script: str, name: str, seconds: float) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=_text(script), name=_text(name), time=f"{seconds:.3f}"
    )


def _add(case: ElementTree.Element, outcome: str, what: str) -> None:
    what = _text(what)
    ElementTree.SubElement(case, outcome, message=what.partition("\n")[0]).text = what


def _text(what: str) -> str:
    """Replace the characters that XML cannot hold."""
    return _NOT_XML.sub("?", what)
