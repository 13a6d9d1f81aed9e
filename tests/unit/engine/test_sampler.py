"""Greedy and seeded draws; the generator against published vectors."""

import math

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from engine.sampling.sampler import first_largest, philox, sample, uniform

V = 50


def random_logits(num_rows, *, seed=0, size=V):
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * 2


def draw_reference(logits, params, uniform_):
    """The definition, by sorting: temperature, top_k, top_p, then the inverse CDF by token id."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[: params.top_k] if params.top_k else order
    total, nucleus, mass = sum(p[i] for i in kept), [], 0.0
    for i in kept:
        nucleus.append(i)
        mass += p[i] / total
        if mass >= params.top_p:
            break
    target = uniform_ * sum(p[i] for i in nucleus)
    for i in sorted(nucleus):
        target -= p[i]
        if target < 0:
            return i
    raise AssertionError("the uniform was not below 1")


@pytest.mark.parametrize(
    ("key", "low", "high", "words"),
    [
        (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**64 - 1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            0x85A308D3243F6A88,
            0x0370734413198A2E,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_agrees_with_the_known_answers_of_random123(key, low, high, words):
    drawn = philox(*(np.array([x], np.uint64) for x in (key, low, high)))
    assert tuple(int(word[0]) for word in drawn) == words


def test_uniforms_are_even_and_their_neighbours_unrelated():
    drawn = uniform([7] * 20000, range(20000))
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert chi_square < 43.8  # 99.9 % point at 19 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(drawn, uniform([8] * 20000, range(20000)))[0, 1]) < 0.03
    assert drawn.min() >= 0.0 and drawn.max() < 1.0


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    logits = torch.zeros(2, V)
    logits[0, [31, 7]] = 3.0
    logits[1, 49] = 1.0
    assert sample(logits, [SamplingParams()] * 2, [0, 0]) == [7, 49]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 10 * V},
    ],
)
def test_draws_agree_with_the_definition(settings, dtype):
    params = SamplingParams(seed=3, **settings)
    logits = torch.randperm(V, generator=torch.Generator().manual_seed(1)) / 10  # no ties
    logits = logits.to(dtype)
    positions = range(200)
    drawn = sample(logits.expand(200, V), [params] * 200, positions)
    uniforms = uniform([3] * 200, positions)
    assert drawn == [draw_reference(logits, params, u) for u in uniforms]


def test_the_nucleus_is_right_when_it_is_wider_than_the_first_candidates():
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    logits = torch.linspace(0, 0.5, 1000)
    drawn = sample(logits.expand(100, 1000), [params] * 100, range(100))
    assert drawn == [draw_reference(logits, params, u) for u in uniform([5] * 100, range(100))]
    assert min(drawn) >= 80


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -math.inf])
    params = SamplingParams(temperature=1.0, seed=11)
    drawn = sample(logits.expand(8000, 5), [params] * 8000, range(8000))
    expected = torch.softmax(logits, -1)[:4] * 8000
    counts = torch.bincount(torch.tensor(drawn), minlength=5)
    chi_square = ((counts[:4] - expected) ** 2 / expected).sum()
    assert counts[4] == 0
    assert chi_square < 16.3  # 99.9 % point at 3 degrees of freedom


def test_a_draw_does_not_depend_on_its_neighbours_or_its_row():
    logits = random_logits(4)
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.8, seed=2),
        SamplingParams(temperature=1.5, top_k=9, seed=3),
    ]
    positions = [10, 20, 30, 40]
    together = sample(logits, params, positions)
    order = [2, 0, 3, 1]
    turned = sample(logits[order], [params[i] for i in order], [positions[i] for i in order])
    alone = [sample(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(4)]
    assert turned == [together[i] for i in order]
    assert alone == together


def test_seed_and_position_change_the_draw_and_nothing_else_does():
    logits = torch.zeros(1, 1000)

    def draw(seed, position):
        return sample(logits, [SamplingParams(temperature=1.0, seed=seed)], [position])

    assert draw(1, 5) == draw(1, 5)
    assert len({draw(seed, 5)[0] for seed in range(8)}) > 4
    assert len({draw(1, position)[0] for position in range(8)}) > 4
    assert draw(2**63 - 1, 5) != draw(2**31 - 1, 5)


def test_the_first_of_equal_logits_is_taken_on_any_device():
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, -1.0, -2.0, 4.0]])
    greedy = [SamplingParams()] * 3
    assert first_largest(rows).tolist() == sample(rows, greedy, [0, 0, 0]) == [1, 0, 3]
    assert first_largest(rows.bfloat16()).tolist() == [1, 0, 3]
    random = random_logits(20, seed=9, size=500)
    assert first_largest(random).tolist() == random.argmax(dim=-1).tolist()
    nan = torch.full((1, 4), float("nan"))
    assert 0 <= int(first_largest(nan)) < 4
