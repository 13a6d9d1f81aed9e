"""Every scenario of tests/data/cases.json is played by a test that is marked with its id."""

import ast
import json
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
CASES = json.loads((TESTS / "data" / "cases.json").read_text())


def marks_of(path):
    """Ids in `pytest.mark.case(...)`, wherever in the module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
            yield from (ast.literal_eval(argument) for argument in node.args)


MARKED = {mark for path in TESTS.rglob("test_*.py") for mark in marks_of(path)}


def test_cases_are_named_once_and_in_order():
    ids = [case["id"] for case in CASES]
    assert ids == sorted(set(ids))
    assert {case["kind"] for case in CASES} == {*range(1, 13), 14, 15}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_is_played_by_a_test_or_cannot_be(case):
    # A feature that is not offered is refused, which is a test, too; without any it says why.
    assert {*case} <= {"id", "kind", "title", "refused", "not_applicable"}
    assert (case["id"] in MARKED) != bool(case.get("not_applicable"))


def test_no_test_plays_an_unknown_case():
    assert MARKED <= {case["id"] for case in CASES}
