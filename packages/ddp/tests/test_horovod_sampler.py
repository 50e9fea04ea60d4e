"""Horovod's elastic sampler: each rank gets equally many samples, and all samples are used."""

from __future__ import annotations

import pytest

from syncline.horovod import elastic


@pytest.mark.parametrize("samples", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_equally_many_samples(samples: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "size", lambda: ranks)
    shares = []
    for rank in range(ranks):
        monkeypatch.setattr(elastic, "rank", lambda rank=rank: rank)
        sampler = elastic.ElasticSampler(range(samples), seed=3)
        share = list(sampler)
        assert len(share) == len(sampler) == -(-samples // ranks)
        shares.append(share)
    assert {index for share in shares for index in share} == set(range(samples))


def test_a_part_of_the_epoch_that_was_used_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "size", lambda: 4)
    monkeypatch.setattr(elastic, "rank", lambda: 3)
    sampler = elastic.ElasticSampler(range(9), shuffle=False)
    sampler.record_batch(0, 2)
    sampler.reset()
    assert list(sampler) == [8]
