"""Planning facts of a recommendation file, old or new."""

from __future__ import annotations

from lmi_bench.report.recommendation_view import build_recommendation_view, planning_facts

CONTENT = {
    "sensitivity": [{"what": "price", "text": "price: B wins if A becomes 20% dearer"}],
    "frontier": [
        {"instance": "ml.a", "instances": 2, "tensor_parallel": 1},
        {"instance": "ml.b", "instances": 1, "tensor_parallel": 8},
    ],
    "vary": {
        "intervals": [
            {
                "from_per_s": 1.0,
                "to_per_s": 4.0,
                "instance": "ml.a",
                "tensor_parallel": 1,
                "copies": 1,
                "fewest_machines": 1,
                "most_machines": 4,
                "least_usd_per_hour": 2.0,
                "most_usd_per_hour": 8.0,
            }
        ]
    },
}


def test_each_part_of_the_file_becomes_a_list_of_facts():
    titles = {each.title: dict(each.items) for each in planning_facts(CONTENT)}
    assert titles["What would change the answer"] == {"price": "price: B wins if A becomes 20% dearer"}
    assert titles["Cheapest to fastest, none beaten in both"]["2"] == "1 × ml.b, TP 8"


def test_a_file_without_them_has_none(recommendation):
    assert planning_facts(recommendation) == []
    assert planning_facts({"vary": None, "sensitivity": "x", "frontier": [3]}) == []


def test_a_page_shows_them_once(recommendation):
    view = build_recommendation_view({**recommendation, **CONTENT}, anchor="r")
    text = str(view.provenance)
    assert text.count("becomes 20% dearer") == 1
    (row,) = view.more[0].rows
    assert [cell.text for cell in row.cells] == ["1", "4", "1 to 4", "ml.a, TP 1 x 1", "2.00 to 8.00", ""]
