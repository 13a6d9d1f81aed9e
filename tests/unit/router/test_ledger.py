"""What was given to whom: sums that always come back to zero."""

from hypothesis import given
from hypothesis import strategies as st

from router.placing.ledger import Ledger, Work


def work(reader="p", decode="d", num_prompt_tokens=30):
    return Work(reader, decode, num_prompt_tokens, num_kv_tokens=50, num_bytes=7)


def test_each_part_of_the_work_counts_until_it_is_done():
    ledger, one = Ledger(), work()
    ledger.begin(one)
    assert (ledger.num_prompts("p"), ledger.num_prompt_tokens("p")) == (1, 30)
    assert (ledger.num_sequences("d"), ledger.num_kv_tokens("d"), ledger.num_all_bytes) == (
        1,
        50,
        7,
    )
    ledger.read(one)
    assert (ledger.num_prompts("p"), ledger.num_prompt_tokens("p")) == (0, 0)
    ledger.shipped(one)
    assert (ledger.num_all_bytes, ledger.num_sequences("d")) == (0, 1)
    ledger.end(one)
    assert ledger.is_empty


acts = st.lists(
    st.tuples(st.sampled_from(["read", "shipped", "end"]), st.integers(0, 5)), max_size=40
)
workers = st.builds(work, st.sampled_from("pd"), st.sampled_from("de"), st.integers(0, 9))


@given(st.lists(workers, max_size=6), acts)
def test_whatever_ends_when_and_how_often_nothing_is_left_or_counted_twice(works, steps):
    ledger = Ledger()
    for each in works:
        ledger.begin(each)
    for act, number in steps:
        if number < len(works):
            getattr(ledger, act)(works[number])
        for name in "pde":
            reading = [w for w in works if w.reader == name and not w.is_read]
            assert ledger.num_prompts(name) == len(reading)
            assert ledger.num_prompt_tokens(name) == sum(w.num_prompt_tokens for w in reading)
            decoding = [w for w in works if w.decode == name and not w.is_ended]
            assert ledger.num_sequences(name) == len(decoding)
    for each in works:
        ledger.end(each)
    assert ledger.is_empty
