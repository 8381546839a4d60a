"""A site that nobody has told anything yet."""

from holdfast import Flow
from holdfast.api.options import Options
from holdfast.sinks import discard
from holdfast.site.config import SiteConfig
from holdfast.site.metrics import IdleSelector
from holdfast.site.runtime import Site
from holdfast.sources import generator
from tests.support.lines import SCHEMA, numbers
from tests.support.parties import party


def lonely_site(controllers: tuple[tuple[str, int], ...] = ()) -> Site:
    flow = Flow("line")
    flow.source("numbers", generator(numbers, SCHEMA)).sink("out", discard())
    config = SiteConfig(0, party(), controllers, "127.0.0.1", Options())
    return Site(flow, config, IdleSelector())
