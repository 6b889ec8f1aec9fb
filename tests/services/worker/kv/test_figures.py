"""What a tier is credited with."""

from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.figures import CacheFigures, TierFigures, read_figures
from tests.services.worker.prefix_rig import PrefixRig, make_engine


def test_a_tier_helped_by_what_it_saved_less_what_it_took() -> None:
    tier = TierFigures("host", 3, 1, 0, 0, 0, 300, saved_s=2.0, spent_s=0.5, in_use=True)
    assert tier.helped_s == 1.5
    details = CacheFigures(
        (tier,), misses=4, loads_abandoned=0, lost_unsaved=0, prefetched=2, kept_blocks=3
    ).details()
    assert details["prefix_misses"] == 4 and details["prefix_tiers"][0]["hits"] == 3


def test_hits_and_misses_are_counted_in_blocks() -> None:
    rig = PrefixRig(make_engine(), PrefixCacheConfig(host_mb=0))
    rig.serve([list(range(25))], chunk=40)
    rig.serve([list(range(25))], chunk=40)
    assert rig.store is not None
    figures = read_figures(rig.store)
    assert (figures.tiers[0].hits, figures.misses) == (6, 6)
    assert figures.tiers[0].helped_s > 0 and figures.tiers[0].loaded_bytes == 0
    rig.close()
