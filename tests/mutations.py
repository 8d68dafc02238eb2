"""Breaks the code on purpose, one place at a time, and looks whether the quick tests notice.

    python tests/mutations.py                       # all of them; some minutes
    python tests/mutations.py --list                # their names
    python tests/mutations.py wrong-noise-position  # some of them

Each defect is written into a temporary copy of the tree, never into the checkout, and the quick test files that ought to catch it
run there until the first failure. A defect whose text no longer occurs exactly once is an error: the code has moved, and the
defect must move with it. So is a test that fails without any defect; ``--trust`` leaves that first run out.

Result on 2026-11-29 (torch 2.13.0, transformers 5.24.0): 87 of 87 caught, in eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What the tests need of the tree.
PARTS = ("decoders", "grammars", "tests", "docs", "plugins", "pyproject.toml", "README.md", "CHANGELOG.md")
#: Longest run of one defect's tests, in seconds: a loop that never ends is caught, too.
LIMIT = 1200


@dataclass(frozen=True)
class Mutation:
    """One defect.

    Attributes:
        name: what goes wrong.
        file: in which file, below the root.
        old: text that occurs there exactly once.
        new: what is put in its place.
        tests: quick test files that ought to catch it, below ``tests``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "the-kernel-sees-one-slot-in-front-of-a-window", "decoders/engine/model/kernels/attention_triton.py",
        "position_q[:, None] - position_k[None, :] < window",
        "position_q[:, None] - position_k[None, :] <= window",
        ("engine/model/kernels/test_tree_attention.py",),
    ),
    Mutation(
        "a-split-is-left-out-of-the-sum", "decoders/engine/model/kernels/attention_triton.py",
        "(split_start(split + 1, FIRST, OCTAVE) > begin)",
        "(split_start(split, FIRST, OCTAVE) > begin)",
        ("engine/model/kernels/test_tree_attention.py",),
    ),
    Mutation(
        "the-66th-node-has-the-bit-of-the-second", "decoders/engine/model/kernels/attention_triton.py",
        "low[:, None], high[:, None])",
        "low[:, None], low[:, None])",
        ("engine/model/kernels/test_tree_attention.py",),
    ),
    Mutation(
        "stretches-of-a-product-are-cut-by-the-number-of-rows", "decoders/engine/model/kernels/products_triton.py",
        "flat.shape[0], plan(outputs, inputs, x.element_size())",
        "flat.shape[0], plan(outputs * flat.shape[0], inputs, x.element_size())",
        ("engine/model/kernels/test_products.py",),
    ),
    Mutation(
        "a-check-at-the-start-sees-no-window", "decoders/engine/model/self_check.py",
        "        target.tell_kinds(tuple(kind.within(reach) for kind in kinds))\n",
        "        pass\n",
        ("engine/model/test_self_check.py",),
    ),
    Mutation(
        "a-strategy-is-not-told-that-its-draft-was-cut", "decoders/engine/decode/proposer.py",
        "            strategy.observe(self.state, step if self._verified is None else replace(step, own_nodes=self._verified))\n",
        "            strategy.observe(self.state, step)\n",
        ("strategies/test_pruned_drafts.py",),
    ),
    Mutation(
        "rows-that-others-wait-for-count-no-more", "decoders/costs/acceptance.py",
        "    likely = [math.exp((steps - longest) / spread) for steps in left]\n",
        "    likely = [1.0 for steps in left]\n",
        ("strategies/test_auto_choosing.py", "engine/decode/test_worth.py"),
    ),
    Mutation(
        "halves-of-a-byte-of-4-bits-are-taken-for-each-other", "decoders/engine/model/kernels/cpu/four_bits.py",
        "(low | high << 4)",
        "(high | low << 4)",
        ("engine/model/kernels/test_cpu_quantized.py",),
    ),
    Mutation(
        "layers-of-other-groups-of-inputs-are-multiplied-as-one", "decoders/engine/model/weights/quantized.py",
        "scales = layer.scales.dtype, layer.scales.shape[1:]",
        "scales = layer.scales.dtype",
        ("engine/model/test_quantization.py",),
    ),
    Mutation(
        "the-end-of-a-kept-prompt-keeps-the-bits-of-another-tier", "decoders/engine/decode/prefix_cache.py",
        "again = multiple if multiple > 1 and not given else 0",
        "again = 0",
        ("engine/model/test_compiled.py",),
    ),
    Mutation(
        "another-image-behind-the-same-tokens-is-taken-for-the-first", "decoders/hf/multimodal.py",
        "_digest((digest, taken, types))",
        "_digest((taken, types))",
        ("hf/images/test_calls.py",),
    ),
    Mutation(
        "rows-of-a-batch-take-each-others-images", "decoders/hf/multimodal.py",
        "_digest((digest, taken, types))",
        "_digest((digest, types))",
        ("hf/images/test_calls.py",),
    ),
    Mutation(
        "a-long-question-begins-a-short-ones-row-within-its-image", "decoders/engine/decode/prompt_reader.py",
        "given=batch.request.given is not None or reads_images,",
        "given=batch.request.given is not None or bool(read),",
        ("hf/images/test_calls.py",),
    ),
    Mutation(
        "a-prefix-that-ends-within-an-image-is-reused", "decoders/engine/decode/prefix_cache.py",
        "return n if n >= self.least else 0",
        "return n",
        ("engine/decode/test_kept_texts.py",),
    ),
    Mutation(
        "placeholders-are-drafted", "decoders/engine/decode/proposer.py",
        "draft.tokens.masked_fill(stands_for_images, -1)",
        "draft.tokens",
        ("hf/images/test_calls.py",),
    ),
    Mutation(
        "text-behind-an-image-is-placed-by-slot", "decoders/engine/model/target.py",
        "positions = positions + buffers.shifts[:, None]",
        "pass",
        ("hf/images/test_designs.py",),
    ),
    Mutation(
        "given-keys-and-values-are-computed-again", "decoders/engine/decode/prefix_cache.py",
        "list(reused) if given else [",
        "[",
        ("exactness/test_given_cache.py",),
    ),
    Mutation(
        "what-a-caller-computed-is-kept-for-others", "decoders/engine/decode/call.py",
        "if batch.request.given is None:",
        "if True:",
        ("exactness/test_given_cache.py",),
    ),
    Mutation(
        "one-token-too-many-is-committed", "decoders/engine/decode/verify.py",
        "emitted = torch.minimum(acceptance.depth + 1, room)",
        "emitted = torch.minimum(acceptance.depth + 2, room)",
        ("exactness/test_architectures.py",),
    ),
    Mutation(
        "rows-that-have-ended-write-on", "decoders/engine/decode/verify.py",
        "room = torch.where(finished, 0, limit - length)",
        "room = limit - length",
        ("engine/decode/test_commit.py",),
    ),
    Mutation(
        "accepted-path-is-not-moved", "decoders/engine/decode/core.py",
        "            move_slots(rows.buffers, rows.length - summary[0] - 1, path)\n",
        "            pass\n",
        ("exactness/test_architectures.py",),
    ),
    Mutation(
        "a-draft-in-shared-slots-runs-what-is-committed-again", "decoders/engine/decode/drafters/counts.py",
        "pending = 0 if self.shared else max(min(self.pending, reach), MIN_PENDING)",
        "pending = max(min(self.pending, reach), MIN_PENDING)",
        ("strategies/test_early_exit.py",),
    ),
    Mutation(
        "a-draft-in-shared-slots-does-not-see-the-end-of-the-prompt", "decoders/engine/decode/drafters/drafter.py",
        "            batch.read_rest()\n",
        "",
        ("strategies/test_early_exit.py",),
    ),
    Mutation(
        "what-steps-show-of-costs-is-forgotten", "decoders/engine/decode/calibration.py",
        "return self._ratios.setdefault((rows, context.bit_length() // 2), {})",
        "return {}",
        ("engine/decode/test_calibration.py",),
    ),
    Mutation(
        "stale-slot-of-the-cache-is-read", "decoders/engine/model/cache.py",
        "buffer[rows, :, target] = buffer[rows, :, source]",
        "buffer[rows, :, target[:, :-1]] = buffer[rows, :, source[:, :-1]]",
        ("engine/model/test_cache.py",),
    ),
    Mutation(
        "stop-token-behind-the-first-new-one-is-ignored", "decoders/engine/decode/verify.py",
        "is_stop = (new[:, :, None] == stop_tokens[..., None, :]).any(-1) & (index < emitted[:, None])",
        "is_stop = (new[:, :, None] == stop_tokens[..., None, :]).any(-1) & (index < 1)",
        ("hf/test_stopping.py",),
    ),
    Mutation(
        "tree-mask-is-dropped", "decoders/engine/model/attention.py",
        "(in_block[:, None] & visible.gather(2, inside[:, None].expand(rows, queries, view)))",
        "in_block[:, None].expand(rows, queries, view)",
        ("engine/model/test_attention.py",),
    ),
    Mutation(
        "sliding-window-is-one-too-long", "decoders/engine/model/attention.py",
        "position_q - position_k < self.window",
        "position_q - position_k <= self.window",
        ("engine/model/test_attention.py", "exactness/test_architectures.py"),
    ),
    Mutation(
        "nodes-are-numbered-by-place-not-by-depth", "decoders/engine/model/target.py",
        "self.arguments(nodes, positions,",
        "self.arguments(nodes, slots,",
        ("exactness/test_architectures.py",),
    ),
    Mutation(
        "mixed-nodes-are-numbered-by-place", "decoders/engine/model/mixed.py",
        "    positions = torch.cat([places.reshape(1, -1), stretch], dim=1)\n",
        "    positions = slots\n",
        ("engine/model/test_mixed.py",),
    ),
    Mutation(
        "rows-go-on-without-the-prompt-that-they-read", "decoders/engine/decode/lane.py",
        "        self._move_to_front([*self.rows, seat])\n",
        "",
        ("scheduling/test_prompts_in_steps.py",),
    ),
    Mutation(
        "a-window-for-drafting-is-accepted", "decoders/engine/decode/verify.py",
        "    on_branch = tree.ancestors\n",
        "    on_branch = tree.visible\n",
        ("engine/decode/test_verify.py", "strategies/test_lookahead.py"),
    ),
    Mutation(
        "a-draft-token-is-accepted-without-its-parent", "decoders/engine/decode/verify.py",
        "accepted = (~on_branch | match[:, None]).all(-1) & on_branch.any(-1)",
        "accepted = match & on_branch.any(-1)",
        ("engine/decode/test_verify.py",),
    ),
    Mutation(
        "a-replay-overwrites-what-a-strategy-was-shown", "decoders/engine/model/compiled/forward_pass.py",
        "        return copied(result) if copy else result\n",
        "        return result\n",
        ("engine/decode/test_replays.py",),
    ),
    Mutation(
        "a-recording-serves-another-tier", "decoders/engine/model/compiled/forward_pass.py",
        "(self, key, self.tiers.tier(rows, plan)), function, given)",
        "(self, key), function, given)",
        ("engine/decode/test_replays.py",),
    ),
    Mutation(
        "a-replay-reads-what-was-given-when-it-was-recorded", "decoders/engine/model/recordings.py",
        "                recording.inputs.take(tensors, self.recorder.copy)\n",
        "                pass\n",
        ("engine/decode/test_replays.py",),
    ),
    Mutation(
        "wrong-noise-position", "decoders/engine/decode/core.py",
        "+ block.tree.offsets\n        prefixes =",
        "+ block.tree.offsets.clamp(max=2)\n        prefixes =",
        ("exactness/test_architectures.py", "strategies/test_conformance.py"),
    ),
    Mutation(
        "noise-of-another-row", "decoders/sampling/choice.py",
        "noise_of(inputs.keys, positions, tokens)",
        "noise_of(inputs.keys.flip(0), positions, tokens)",
        ("sampling/test_choice.py",),
    ),
    Mutation(
        "noise-is-index-arithmetic", "decoders/sampling/processors.py",
        "return (start * GOLDEN_INVERSE + steps) * GOLDEN",
        "return start + steps * GOLDEN",
        ("engine/model/test_triton_code.py",),
    ),
    Mutation(
        "all-rows-share-their-noise", "decoders/sampling/processors.py",
        "return mix64(advanced(mix64(start), index))",
        "return mix64(mix64(start) + 0 * index)",
        ("sampling/test_processors.py", "hf/test_sampling.py"),
    ),
    Mutation(
        "both-draws-of-a-step-share-their-noise", "decoders/engine/decode/rules.py",
        "_NEXT_TOKEN = -2",
        "_NEXT_TOKEN = _END_NODE",
        ("verifiers/test_draw.py",),
    ),
    Mutation(
        "every-step-draws-with-the-same-noise", "decoders/engine/decode/verify.py",
        "return mix64(mix64(keys) + positions)",
        "return mix64(mix64(keys))",
        ("verifiers/test_draw.py", "exactness/test_draft_distribution.py"),
    ),
    Mutation(
        "min-new-tokens-counts-one-too-many", "decoders/sampling/processors.py",
        "is_stop & (positions[..., None] < value)",
        "is_stop & (positions[..., None] <= value)",
        ("sampling/test_processors.py",),
    ),
    Mutation(
        "rejection-swaps-p-and-q", "decoders/verifiers/builtin.py",
        "normalised((p - q).clamp(min=0), p)",
        "normalised((q - p).clamp(min=0), p)",
        ("verifiers/test_rules.py",),
    ),
    Mutation(
        "rejection-ends-a-chain-too-often", "decoders/verifiers/builtin.py",
        "Outcomes(reach * (1 - pad(accept, (0, 1)))",
        "Outcomes(reach * (1 - pad(accept, (0, 1)) ** 2)",
        ("verifiers/test_rules.py",),
    ),
    Mutation(
        "block-verification-forgets-what-was-accepted-before", "decoders/verifiers/builtin.py",
        "weight[:, :-1, None] * p - q",
        "p - q",
        ("verifiers/test_rules.py",),
    ),
    Mutation(
        "siblings-are-judged-as-drawn-with-replacement", "decoders/verifiers/builtin.py",
        "tried = tried | (proposed & (vocabulary == token))",
        "tried = tried & False",
        ("verifiers/test_rules.py",),
    ),
    Mutation(
        "merged-trees-keep-the-parents-of-the-second", "decoders/tree/tensors.py",
        "parents = torch.where(other.parents > 0, other.parents + shift, 0)[:, 1:]",
        "parents = other.parents[:, 1:]",
        ("tree/test_tree.py",),
    ),
    Mutation(
        "merged-topologies-are-renumbered-one-short", "decoders/tree/topology.py",
        "return node if node <= 0 else node + shift",
        "return node if node <= 0 else node + shift - (shift > 1)",
        ("tree/test_tree.py",),
    ),
    Mutation(
        "a-merged-part-sees-its-path-one-node-early", "decoders/strategies/merged.py",
        "torch.where(inside, path - begin + 1,",
        "torch.where(inside, path - begin,",
        ("strategies/test_merged_drafts.py",),
    ),
    Mutation(
        "a-whole-layer-looks-back-without-end", "decoders/engine/model/weights/decoder_layers.py",
        "[kind.window or 0 for kind in kinds], ", "[0 for kind in kinds], ",
        ("engine/model/test_whole_layers.py",),
    ),
    Mutation(
        "a-whole-layer-adds-to-what-attention-got", "decoders/engine/model/kernels/cpu/elementwise.cpp",
        "            x = sum;\n", "            if (step) x = sum;\n",
        ("engine/model/test_whole_layers.py",),
    ),
    Mutation(
        "a-result-computed-ahead-is-taken-for-another-input", "decoders/engine/model/weights/decoder_layers.py",
        "expected is layer and self.source is x and all(", "expected is layer and all(",
        ("engine/model/test_whole_layers.py",),
    ),
    Mutation(
        "layers-behind-a-hook-are-computed-ahead", "decoders/engine/model/weights/decoder_layers.py",
        "hooks_of(layers[-1])[0] or hooks_of(following.layer)[1]", "hooks_of(following.layer)[1]",
        ("engine/model/test_whole_layers.py",),
    ),
    Mutation(
        "a-layer-gets-the-columns-of-its-neighbour", "decoders/engine/model/weights/layers.py",
        "return joint.narrow(-1, begin, end - begin)",
        "return joint.narrow(-1, 0, end - begin)",
        ("engine/model/test_fused.py", "engine/model/test_few_rows.py"),
    ),
    Mutation(
        "a-product-of-another-input-is-shared", "decoders/engine/model/weights/layers.py",
        "if self.source is not x or self.by is not by or self.writes != writes_counted(x):",
        "if self.by is not by or self.writes != writes_counted(x):",
        ("engine/model/test_fused.py",),
    ),
    Mutation(
        "uncounted-writes-to-weights-are-not-seen", "decoders/engine/model/weights/state.py",
        "host.append(_sample(tensor))",
        "host.append(None)",
        ("engine/model/test_weight_state.py", "engine/model/test_live_modules.py", "engine/decode/test_reuse.py"),
    ),
    Mutation(
        "kept-texts-outlive-their-weights", "decoders/engine/decode/engine.py",
        "                self._prepared = started, time.perf_counter() - started, 0.0, 0.0\n                self.sessions.forget()\n",
        "                self._prepared = started, time.perf_counter() - started, 0.0, 0.0\n",
        ("engine/decode/test_reuse.py",),
    ),
    Mutation(
        "one-token-too-many-of-a-prefix-is-reused", "decoders/engine/decode/sessions.py",
        "reused.append(min(max(longest, in_place), len(prompt.tokens) - 1))",
        "reused.append(min(max(longest, in_place) + 1, len(prompt.tokens) - 1))",
        ("engine/decode/test_session.py",),
    ),
    Mutation(
        "a-row-reuses-the-text-of-another", "decoders/engine/decode/sessions.py",
        "moves.append((row, holder.stored.buffers, source_row, reused[-1]))",
        "moves.append((row, holder.stored.buffers, 0, reused[-1]))",
        ("engine/decode/test_session.py",),
    ),
    Mutation(
        "prompts-keep-their-left-padding", "decoders/hf/arguments.py",
        "return [ids[keep] for ids, keep in zip(input_ids, mask, strict=True)]",
        "return list(input_ids)",
        ("exactness/test_architectures.py",),
    ),
    Mutation(
        "penalties-forget-the-path-to-a-node", "decoders/sampling/prefixes.py",
        "return torch.where(self.visible & behind, self.nodes[:, None], _NONE)",
        "return torch.full_like(self.visible, _NONE, dtype=torch.int64)",
        ("sampling/test_prefixes.py", "engine/decode/test_text_operations.py"),
    ),
    Mutation(
        "steps-of-other-penalties-are-taken-for-the-same", "decoders/engine/decode/kind.py",
        "StepKind(parts, request.plan, ",
        "StepKind(parts, SamplingPlan(), ",
        ("engine/decode/test_kind.py",),
    ),
    Mutation(
        "processors-see-a-prefix-that-is-one-short", "decoders/engine/decode/criteria.py",
        "padded_rows.of(row, generated + depth, paths.get(row, ()))",
        "padded_rows.of(row, max(generated + depth - 1, 0), paths.get(row, ()))",
        ("hf/test_processors.py",),
    ),
    Mutation(
        "criteria-see-the-whole-step-at-once", "decoders/engine/decode/criteria.py",
        "self.padded_rows.of(row, done + count, tokens)",
        "self.padded_rows.of(row, done + outcome.emitted[row], tokens)",
        ("hf/test_stopping.py",),
    ),
    Mutation(
        "criteria-are-asked-as-far-as-the-fastest-row", "decoders/engine/decode/criteria.py",
        "last = min(going) if going",
        "last = max(going) if going",
        ("hf/test_stopping.py", "hf/test_processors.py"),
    ),
    Mutation(
        "a-token-behind-its-marker", "decoders/constraints/tags/phases.py",
        "if not legal[target, found.rest]:",
        "if False:",
        ("constraints/test_tags.py", "hf/test_tags.py"),
    ),
    Mutation(
        "a-thought-that-is-too-long", "decoders/constraints/tags/phases.py",
        "place.count < phase.budget:",
        "place.count <= phase.budget:",
        ("constraints/test_tags.py", "hf/test_tags.py"),
    ),
    Mutation(
        "a-draw-that-is-not-replaced", "decoders/engine/decode/verify.py",
        "return tokens if masks is None else masks.written(tokens)",
        "return tokens",
        ("hf/test_tags.py",),
    ),
    Mutation(
        "grammar-mask-of-the-parent", "decoders/engine/decode/grammar/host_guide.py",
        "reached[node], mask[node], kind[node] = position, text.mask(position), text.kind(position)",
        "reached[node], mask[node], kind[node] = position, mask[parent], text.kind(position)",
        ("engine/decode/grammar/test_guide.py", "hf/test_grammar.py"),
    ),
    Mutation(
        "a-node-without-its-grammar-mask", "decoders/engine/decode/grammar/host_guide.py",
        "reached[node], mask[node], kind[node] = position, text.mask(position), text.kind(position)",
        "reached[node], kind[node] = position, text.kind(position)",
        ("engine/decode/grammar/test_guide.py", "hf/test_grammar.py"),
    ),
    Mutation(
        "drafter-reads-too-few-pending-tokens", "decoders/engine/decode/drafters/drafter.py",
        "self.counts.pending = self.counts.level + behind\n",
        "self.counts.pending = self.counts.level\n",
        ("strategies/test_draft_model_calls.py",),
    ),
    Mutation(
        "drafter-reads-two-pending-tokens-too-few", "decoders/engine/decode/drafters/drafter.py",
        "self.counts.pending = self.counts.level + behind\n",
        "self.counts.pending = self.counts.level + behind - 2\n",
        ("strategies/test_draft_model_calls.py",),
    ),
    Mutation(
        "an-anchor-inside-a-pattern-is-dropped", "decoders/constraints/patterns/python.py",
        "case Anchor(end=False) if not first:",
        "case Anchor(end=False) if False:",
        ("constraints/test_specs.py",),
    ),
    Mutation(
        "alternatives-are-written-without-a-group", "decoders/constraints/patterns/tree.py",
        "todo += _enclosed(part) if isinstance(part, Or) else [part]",
        "todo += [part]",
        ("constraints/patterns/test_dialects.py",),
    ),
    Mutation(
        "medusa-takes-the-next-rank", "decoders/strategies/medusa.py",
        "best[:, state.level, state.rank]",
        "best[:, state.level, (state.rank + 1) % state.ranks]",
        ("strategies/test_medusa.py",),
    ),
    Mutation(
        "pool-keeps-one-ngram-too-many-per-key", "decoders/strategies/lookahead.py",
        "alive = torch.cat([first, stays], 1) & (ranks < per_key)",
        "alive = torch.cat([first, stays], 1) & (ranks <= per_key)",
        ("strategies/test_lookahead_pool.py",),
    ),
    Mutation(
        "prompt-lookup-reads-behind-the-text", "decoders/strategies/prompt_lookup.py",
        "ends + 1 + steps % period",
        "ends + 1 + steps",
        ("strategies/test_prompt_lookup.py",),
    ),
    Mutation(
        "a-stream-shows-half-a-stop-string", "decoders/server/texts.py",
        "count = len(text) if ended else len(text) - unfinished(text, stops)",
        "count = len(text)",
        ("server/test_texts.py",),
    ),
    Mutation(
        "a-client-that-leaves-keeps-its-row", "decoders/server/answers.py",
        "await asyncio.wait({working, watch}, return_when=asyncio.FIRST_COMPLETED)",
        "await asyncio.wait({working})",
        ("server/test_running.py",),
    ),
    Mutation(
        "any-key-opens", "decoders/server/limits.py",
        "if hmac.compare_digest(given, key)]",
        "if given]",
        ("server/test_refusals.py",),
    ),
    Mutation(
        "log-probabilities-of-nodes-that-were-not-taken", "decoders/engine/decode/output.py",
        "logits = out.logits[first + row, out.path[first + row, :count]]",
        "logits = out.logits[first + row, :count]",
        ("scheduling/test_scheduler.py",),
    ),
    Mutation(
        "the-targets-own-token-counts-as-drafted", "decoders/engine/decode/output.py",
        "[*drafters[:accepted], *[\"\"] * (count - accepted)]",
        "[request.strategy.name] * count",
        ("scheduling/test_scheduler.py",),
    ),
    Mutation(
        "who-waits-for-its-prompt-loses-its-place", "decoders/engine/decode/lane.py",
        "for seat in self.seats if seat not in seats}",
        "for seat in self.seats if seat not in seats and seat.plan is not None}",
        ("scheduling/test_scheduler.py",),
    ),
    Mutation(
        "compiled-for-a-view", "decoders/engine/model/compiled/regions.py",
        "    return tensor.clone(memory_format=torch.contiguous_format)\n",
        "    return tensor.contiguous()\n",
        ("engine/model/test_compiled.py",),
    ),
    Mutation(
        "prompt-of-the-next-request-is-not-read", "decoders/engine/decode/lane.py",
        "for chunk in seat.chunks if not anew else ():",
        "for chunk in ():",
        ("scheduling/test_scheduler.py",),
    ),
    Mutation(
        "plain-steps-cost-as-much-as-blocks", "decoders/engine/decode/calibration.py",
        "        forward_pass.fit(session.blocks, rows)\n",
        "",
        ("engine/decode/test_calibration.py",),
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which defects; all of them if none is named")
    parser.add_argument("--list", action="store_true", help="say their names and stop")
    parser.add_argument("--jobs", type=int, default=2, help="how many run side by side")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a defect first")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no such defect: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTATIONS if not arguments.names or m.name in arguments.names]
    if arguments.list:
        print("\n".join(m.name for m in chosen))
        return 0
    for mutation in chosen:
        mutated(mutation)  # says before anything runs which texts are gone
    if not arguments.trust:
        failed = first_failure(None, sorted({test for m in chosen for test in m.tests}))
        if failed is not None:
            raise SystemExit(f"fails without any defect: {failed}")
    survivors = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutation, caught_by in zip(chosen, pool.map(lambda m: first_failure(m, m.tests), chosen), strict=True):
            print(f"{'caught' if caught_by else 'SURVIVED':9}{mutation.name:55}{caught_by or ''}", flush=True)
            if caught_by is None:
                survivors.append(mutation.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


def mutated(mutation: Mutation) -> str:
    """The file's text with the defect in it."""
    text = (ROOT / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.name}: the text to replace occurs {text.count(mutation.old)} times in {mutation.file}, not once:\n"
            f"  {mutation.old}"
        )
    return text.replace(mutation.old, mutation.new)


def first_failure(mutation: Mutation | None, tests: tuple[str, ...] | list[str]) -> str | None:
    """The first test that fails in a copy of the tree with the defect; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        for part in filter(lambda p: (ROOT / p).exists(), PARTS):
            source, target = ROOT / part, copy / part
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        if mutation is not None:
            (copy / mutation.file).write_text(mutated(mutation))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        # The copy comes before an installed package; hypothesis takes the same examples every time.
        environment = os.environ | {"PYTHONPATH": folder, "CI": "true"}
        try:
            run = subprocess.run(
                [*command, *(f"tests/{test}" for test in tests)],
                cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end after {LIMIT} s"
    if run.returncode == 0:
        return None
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+::[^\n]*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode != 1 or not failures:  # not collected, say: nothing was tested
        raise SystemExit(
            f"{mutation.name if mutation else 'no defect'}: pytest ended with {run.returncode}\n{run.stdout}"
        )
    return failures[0]


if __name__ == "__main__":
    raise SystemExit(main())
