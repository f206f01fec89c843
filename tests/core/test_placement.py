"""Who owns what, as data: turns, hashes and given ranks, and spans of tensors."""

from __future__ import annotations

from zlib import crc32

import pytest

from shoal.core.errors import PlanError
from shoal.core.pieces import share_out, spans
from shoal.core.placement import Placement, check_placement, owners_of

LAYERS = {"head": ["head.weight", "head.bias"], "body.1": ["body.1.weight"], "(model)": ["scale"]}
NAMES = [name for names in LAYERS.values() for name in names]


def ranks(
    placement: Placement, owners: range = range(3), layers: dict[str, list[str]] = LAYERS
) -> dict[str, int]:
    return {name: owner.among(owners) for name, owner in owners_of(placement, layers).items()}


def test_turns_go_on_from_layer_to_layer_in_their_order() -> None:
    assert ranks("round-robin") == dict(zip(NAMES, [0, 1, 2, 0], strict=True))
    assert ranks("round-robin", range(3, 5)) == dict(zip(NAMES, [3, 4, 3, 4], strict=True)), (
        "servers"
    )
    backwards = {name: LAYERS[name] for name in reversed(LAYERS)}
    assert ranks("round-robin", layers=backwards)["scale"] == 0


def test_a_hash_depends_on_the_name_alone() -> None:
    assert ranks("hash") == {name: crc32(name.encode()) % 3 for name in NAMES}
    assert ranks("hash")["head.weight"] == 2, "in every process"
    fewer = {"head": LAYERS["head"]}
    assert ranks("hash", layers=fewer).items() <= ranks("hash").items()


def test_names_and_globs_give_layers_and_parameters_to_ranks_and_the_last_wins() -> None:
    assert ranks({"*": 2, "head": 0, "*.bias": 1}) == dict(zip(NAMES, [0, 1, 2, 2], strict=True))
    assert ranks({"scale": 1, "(model)": 2}, range(7)) == {"scale": 2}
    assert ranks({"head.weight": 4}, range(3, 5)) == {"head.weight": 4}, (
        "a rank, whoever the owners are"
    )
    assert ranks({}) == ranks("balanced") == {}


@pytest.mark.parametrize(
    ("placement", "servers", "stale", "says"),
    [
        ("robin", 0, False, "got: 'robin'(.|\n)*balanced, round-robin, hash"),
        ({"head": 1.0}, 0, False, "neither a policy nor ranks"),
        ({"head": True}, 0, False, "neither a policy nor ranks"),
        (
            {"heat.*": 0},
            0,
            False,
            r"placement of 'heat\.\*' matches no layer or parameter(.|\n)*head",
        ),
        ({"head": 2}, 0, False, r"head\.weight(.|\n)*rank 2(.|\n)*ranks 0 … 1"),
        ({"head": -1}, 1, False, "ranks 0 … 2"),
        (
            {"head": 1},
            2,
            True,
            "rank 1, which runs ahead(.|\n)*ranks 2 … 3, the servers(.|\n)*staleness to 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    placement: Placement, servers: int, stale: bool, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        check_placement(placement, LAYERS, 2, servers, stale=stale)


def test_what_is_given_goes_whole_and_the_rest_in_shares() -> None:
    sizes, shares = [5, 0, 7, 3, 1], [0.5, 0.25, 0.25]
    assert spans(sizes, shares, [None] * 5) == share_out(sizes, shares)
    placed = spans(sizes, shares, [None, 1, 1, None, 2])
    assert placed == [[(0, 0, 4)], [(0, 4, 5), (2, 0, 7), (3, 0, 1)], [(3, 1, 3), (4, 0, 1)]]
