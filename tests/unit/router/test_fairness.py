"""The order of the line: priorities, and fair shares among clients."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import Priority
from router.placing.fairness import FairQueue, Ticket


def ticket(client="a", num_tokens=10, *, priority=Priority.NORMAL, is_begun=False):
    return Ticket(client, priority, is_begun, 5, num_tokens, arrived_s=0.0)


def pushed(*tickets):
    line = FairQueue()
    for each in tickets:
        line.push(each)
    return line


def served(line, count):
    order = []
    for _ in range(count):
        next_one = next(iter(line))
        line.serve(next_one)
        order.append(next_one)
    return order


def test_requests_of_one_client_are_served_as_they_came():
    tickets = [ticket(num_tokens=cost) for cost in (30, 1, 20)]
    assert served(pushed(*tickets), 3) == tickets


def test_a_hundred_requests_of_one_client_do_not_delay_another_ones_first():
    many, single = [ticket("many") for _ in range(100)], ticket("single")
    line = pushed(*many)
    served(line, 40)
    line.push(single)
    assert single in served(line, 2)


def test_shares_are_of_tokens_and_not_of_requests():
    large, small = [ticket("l", 100) for _ in range(9)], [ticket("s", 10) for _ in range(90)]
    first = served(pushed(*large, *small), 44)
    tokens = {
        name: sum(each.num_tokens for each in first if each.client == name) for name in ("l", "s")
    }
    assert abs(tokens["l"] - tokens["s"]) <= 100


def test_a_higher_priority_goes_first_and_what_was_begun_before_all():
    low, normal = ticket(priority=Priority.LOW), ticket()
    high = ticket(priority=Priority.HIGH)
    resumed = ticket(priority=Priority.LOW, is_begun=True)
    assert served(pushed(low, normal, high, resumed), 4) == [resumed, high, normal, low]


def test_a_client_is_not_charged_for_what_it_withdraws():
    gone, kept, other = ticket("a", 1000), ticket("a", 10), ticket("b", 20)
    line = pushed(ticket("b", 1), gone)
    line.withdraw(gone)
    line.push(kept)
    line.push(other)
    assert served(line, 3)[1:] == [kept, other]


def test_what_clients_had_is_forgotten_when_nobody_waits():
    line = pushed(ticket("a", 1000))
    served(line, 1)
    late, later = ticket("a"), ticket("b")
    line.push(late)
    line.push(later)
    assert served(line, 2) == [late, later]


def test_who_is_ahead_of_a_new_request():
    many = [ticket("a") for _ in range(5)]
    line = pushed(*many, ticket("a", priority=Priority.LOW))
    assert list(line.ahead_of("b", Priority.NORMAL)) == many[:1]
    assert list(line.ahead_of("a", Priority.NORMAL)) == many
    assert list(line.ahead_of("a", Priority.HIGH)) == []


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.sampled_from(Priority)),
        min_size=1,
        max_size=40,
    ),
    st.data(),
)
def test_the_prediction_of_who_is_ahead_comes_true(waiting, data):
    line = pushed(*(ticket(client, cost, priority=rank) for client, cost, rank in waiting))
    served(line, data.draw(st.integers(0, len(waiting))))
    client, rank = data.draw(st.sampled_from("abc")), data.draw(st.sampled_from(Priority))
    ahead, new = list(line.ahead_of(client, rank)), ticket(client, priority=rank)
    line.push(new)
    assert served(line, len(ahead) + 1) == [*ahead, new]


@given(st.data())
def test_whatever_happens_each_ticket_leaves_once_and_backlogged_clients_keep_pace(data):
    line, inside, num_served = FairQueue(), [], dict.fromkeys("ab", 0)
    always = [ticket("a", 7) for _ in range(200)] + [ticket("b", 3) for _ in range(200)]
    for each in always:
        line.push(each)
    for act in data.draw(st.lists(st.sampled_from(["push", "serve", "withdraw"]), max_size=60)):
        if act == "push":
            inside.append(ticket("c", data.draw(st.integers(1, 9))))
            line.push(inside[-1])
        elif act == "serve":
            (done,) = served(line, 1)
            if done in inside:
                inside.remove(done)
            else:
                num_served[done.client] += done.num_tokens
        elif inside:
            line.withdraw(inside.pop())
        waiting = list(line)
        assert len(waiting) == len(set(map(id, waiting))) == len(line)
        assert waiting == sorted(waiting, key=lambda each: each.place_in_line)
        assert abs(num_served["a"] - num_served["b"]) <= 7 + 3


def test_a_ticket_leaves_only_once():
    one = ticket()
    line = pushed(one, dataclasses.replace(one))
    line.serve(one)
    with pytest.raises(ValueError, match="not in list"):
        line.withdraw(one)
