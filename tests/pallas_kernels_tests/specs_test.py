"""The named shapes are those of the published configs."""

import json
import pathlib

from absl.testing import absltest, parameterized

from pallas_kernels import specs

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FIELDS = {
    "hidden": "hidden_size",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "rope_dim": "qk_rope_head_dim",
    "window": "sliding_window",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "streams": "hc_mult",
    "swiglu_limit": "swiglu_limit",
}


class SpecsTest(parameterized.TestCase):
    @parameterized.parameters("flash", "pro")
    def test_released_shapes(self, name):
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        for field, key in FIELDS.items():
            self.assertEqual(getattr(specs.SPECS[name], field), config[key], field)


if __name__ == "__main__":
    absltest.main()
