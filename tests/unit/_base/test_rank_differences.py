"""The words for what differs between ranks: values, ranks and hosts."""

from hybridtrain._base.rank_differences import RankFacts, differences


def test_the_ranks_of_each_value_are_named_as_runs_with_their_hosts():
    values = [4, 4, 4, 5, 4, 5]
    everyones = [RankFacts({"a": v, "b": 1}, f"n{rank // 2}") for rank, v in enumerate(values)]
    assert list(differences(everyones)) == [
        ("a", "4 on ranks 0-2, 4 (n0, n1, n2), 5 on ranks 3, 5 (n1, n2)")
    ]


def test_a_fact_that_a_rank_does_not_know_is_not_a_difference():
    everyones = [RankFacts({"a": 1}, "n0"), RankFacts({"a": None}, "n1"), RankFacts({}, "n2")]
    assert list(differences(everyones)) == []


def test_many_hosts_are_cut_short():
    everyones = [RankFacts({"a": rank > 0}, f"n{rank}") for rank in range(100)]
    ((_, words),) = differences(everyones)
    assert words == "False on rank 0 (n0), True on ranks 1-99 (n1, n2, n3, n4, ...)"
