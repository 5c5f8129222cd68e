"""Online DPO: DPO on the policy's own pairs (Guo et al. 2024, arXiv 2402.04792)."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.recipes.dpo import DPO
from easyrl.recipes.preference import SampledPairs


@dataclass(frozen=True)
class OnlineDPO(SampledPairs, DPO):
    r"""DPO on pairs that the policy itself has sampled, one for each prompt of the batch.

    .. math::
        L = -\frac{1}{P} \sum_x \log \sigma\big(\hat r(x, y_w) - \hat r(x, y_l)\big), \quad
        \hat r(x, y) = \beta \log \frac{\pi(y \mid x)}{\pi_{ref}(y \mid x)}

    a sum over the P prompts of an optimizer step, of whose G responses w is the best and l the
    worst. The paper ("Direct Language Model Alignment from Online AI Feedback") samples two and has
    a language model annotate them, here the rewards do. With G above 2, best against worst is the
    way of iterative DPO (RLHF Workflow, arXiv 2405.07863, G = 8). Of both papers the abstract or a
    summary alone was at hand. Beta is DPO's 0.1, which TRL's online DPO has, too.
    """
