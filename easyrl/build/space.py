"""What a run says of the space for what it is going to write."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from easyrl.config import Config
from easyrl.doctor.architecture import count_parameters, weight_shapes
from easyrl.doctor.finding import Finding, findings_of
from easyrl.doctor.space import disk_finding, weight_space_finding

logger = logging.getLogger(__name__)


def warn_of_little_space(config: Config) -> None:
    """Warns where disk or shared memory will not hold what the run is going to write."""

    def look() -> Iterator[Finding]:
        num_parameters = count_parameters(weight_shapes(config.model))
        yield disk_finding(config, num_parameters)
        if config.source == "rollouts":
            yield weight_space_finding(config, num_parameters)

    for finding in findings_of("space", look):
        if finding.verdict == "failed":
            logger.warning("%s: %s; %s", finding.name, finding.seen, finding.remedy)
