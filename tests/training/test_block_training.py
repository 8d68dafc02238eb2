"""Training of block draft models: blocks are those of decoding, a resumed run ends where a whole one does, files load, here and in
`speculators`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import decoders
from decoders.errors import SettingsError, TrainingError
from decoders.heads.dflash_files import load_draft_model, read_config, save_draft_model
from decoders.strategies import DFlash
from decoders.testing import decode, prompts, tiny_model
from decoders.testing.spy import Spy
from decoders.training.dflash import BlockLearner, begin_with, block_config, fit_context, new_draft_model, train_dflash
from decoders.training.feature_heads import Teacher, layer_config
from decoders.training.recipes import BlockTraining
from decoders.training.texts import Job, Texts

SMALL = BlockTraining(
    block=4,
    rank=6,
    tokens=24 * 24,
    length=24,
    own_share=0.5,
    epochs=2,
    rows=4,
    rate=3e-3,
    blocks=0.2,
    bf16=False,
    patience=50,
)
CPU, FULL, MASK = torch.device("cpu"), torch.float32, 7
#: Tokens of a reduced vocabulary.
SOME = torch.arange(1, 128, 2)


def run(**changes) -> BlockTraining:
    return replace(SMALL, **changes)


def a_learner(model, training=SMALL, ids=None, from_last=True, text=None):
    """One whose draft model says something of its own."""
    ids = torch.arange(128) if ids is None else ids
    config = block_config(training, layer_config(model, None, 2), training.layers_of(2), len(ids), MASK)
    if not from_last:
        config = replace(config, from_last=False, block_size=training.block + 1)
    draft, generator = new_draft_model(model, training, config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    text = torch.randint(1, 128, (4, training.length), generator=generator) if text is None else text
    rows = Texts(text, torch.full((len(text),), text.shape[1]))
    return BlockLearner(training, draft, Teacher(model, config.layers, training.bf16), ids, rows, rows)


def save(learner: BlockLearner, folder, model, ids=None) -> str:
    draft, output = learner.model, learner.output if learner.own_output else None
    save_draft_model(draft.config, draft.network, draft.head, folder, model, ids, output, FULL)
    return str(folder)


def a_model(name: str, **options):
    """One whose output head has a bias that decides, if it has one."""
    model = tiny_model(name, **options)
    if (bias := model.get_output_embeddings().bias) is not None:
        with torch.no_grad():
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(5)))
    return model


@pytest.mark.parametrize(
    "name, options, from_last, head, ids",
    [
        ("llama", {}, True, "vanilla", None),
        ("llama", {}, False, "vanilla", SOME),
        ("llama", {}, True, None, None),
        ("llama", {}, True, "rnn", SOME),
        ("granite", {"logits_scaling": 0.05}, True, "vanilla", None),
        ("phi", {}, True, "vanilla", None),
        ("phi", {}, True, "vanilla", SOME),
    ],
    ids=["dspark", "from masks", "no head", "recurrent head", "scaled logits", "biased head", "biased head of some"],
)
@torch.no_grad()
def test_blocks_are_those_of_decoding_with_what_was_written(tmp_path, name, options, from_last, head, ids) -> None:
    model, target, inputs = a_model(name, **options), decoders.enable(a_model(name, **options)), prompts(2)
    learner = a_learner(model, run(rank=6 if head else 0, head=head or "vanilla"), ids, from_last)
    assert learner.own_output == (name == "granite" or ids is not None)
    spy = Spy(DFlash(draft_model=save(learner, tmp_path, model, ids)))
    given = load_draft_model(tmp_path, CPU, FULL)
    begin_with(given, learner.model.config, learner.output)
    if learner.own_output:
        with pytest.raises(SettingsError, match="output head are the target's"):
            begin_with(given, learner.model.config, learner.output + 1)
    out = decode(target, inputs, spy, max_new_tokens=10)
    assert torch.equal(out.sequences, decode(target, inputs, "autoregressive", max_new_tokens=10).sequences)
    row, padding = 1, int((inputs["attention_mask"][1] == 0).sum())
    text = out.sequences[row, padding:][None]
    lesson = learner.teacher.lesson(Texts(text, torch.tensor([text.shape[1]])), ())
    # Blocks of all steps at once: what a training step learns from is what decoding drafts.
    anchors = torch.tensor([[step.lengths[row] - 1 for step in spy.seen if not step.finished[row]]])
    chain = list(learner._scores(learner.drafted(lesson, text, anchors), text.gather(1, anchors).T))
    drafted = torch.stack([learner.ids[scores.argmax(-1)] for scores in chain], 1)
    steps = [step.draft.tokens[row].tolist() for step in spy.seen if not step.finished[row]]
    assert drafted.tolist() == steps and len({tuple(tokens) for tokens in steps}) > 2


def test_an_embedding_with_a_norm_of_its_own_is_read_without() -> None:
    """As in decoding."""
    model = tiny_model("llama")
    table = model.get_input_embeddings()
    table.embed_norm = torch.nn.LayerNorm(32)
    table.register_forward_hook(lambda table, _, output: table.embed_norm(output))
    assert torch.equal(a_learner(model)._embed(torch.arange(9)), table.weight[:9])


def test_gradients_are_those_of_the_sum_of_all_losses(model) -> None:
    learner = a_learner(model, run(length=12, blocks=0.4), SOME)
    loss = learner.learn(0)
    gradients = {name: p.grad.clone() for name, p in learner.model.named_parameters()}
    learner.model.zero_grad()
    texts = learner.train.chosen(learner.examples_of(0))
    lesson = learner.teacher.lesson(texts, ())
    anchors, total, count = learner._anchors(lesson, 0), 0.0, 0
    for row in range(4):
        own = Texts(texts.ids[row : row + 1], texts.own[row : row + 1])
        for anchor in anchors[row].tolist():  # one block at a time
            single = learner.teacher.lesson(own, ())
            block = learner.drafted(single, own.ids, torch.tensor([[anchor]]))
            for k, scores in enumerate(learner._scores(block, own.ids[:, anchor : anchor + 4])):
                target = single.logits[0, anchor + k]
                if target.argmax() in SOME:
                    total = total - 0.8**k * (target[SOME].softmax(-1) * scores[0].log_softmax(-1)).sum()
                    count += 1
    (total / count).backward()
    torch.testing.assert_close(loss, (total / count).detach(), atol=1e-5, rtol=1e-5)
    for name, p in learner.model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3)


def test_acceptance_is_that_of_decoding(tmp_path, model) -> None:
    """Of the model's own text chains are accepted exactly as far as decoding accepts them."""
    prompt = torch.randint(1, 128, (1, 9), generator=torch.Generator().manual_seed(2))
    text = model.generate(prompt, max_new_tokens=35, do_sample=False, eos_token_id=None, pad_token_id=0)
    learner = a_learner(model, run(length=40, rate=1e-2), text=text[:, :40])
    for step in range(20):  # untrained it is never right
        learner.learn(step)
        for optimizer in learner.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    outcome = learner.acceptance(Texts(text[:, :40], torch.tensor([9])))
    folder, target = save(learner, tmp_path, model), decoders.enable(tiny_model("llama"))
    reached, right, anchors = torch.zeros(4), torch.zeros(4), range(8, 37, 4)  # those after what the model was given
    for anchor in anchors:
        spy, read = Spy(DFlash(draft_model=folder)), text[:, : anchor + 1]
        decode(target, {"input_ids": read, "attention_mask": torch.ones_like(read)}, spy, max_new_tokens=1)
        hits = (spy.seen[0].draft.tokens[0] == text[0, anchor + 1 : anchor + 5]).long()
        reached, right = reached + hits.cumprod(0), right + hits
    assert outcome.drafts == len(anchors) and reached[0] > 0 and (reached != right).any()
    assert outcome.reached == pytest.approx((reached / len(anchors)).tolist())
    assert outcome.rates == pytest.approx((right / len(anchors)).tolist())


@pytest.mark.slow
def test_what_is_trained_is_better_and_its_card_says_so(tmp_path, model, word_tokenizer, counting_texts) -> None:
    def train(name: str, **changes):
        return train_dflash(
            model, word_tokenizer,
            Job(counting_texts, tmp_path / name, test=counting_texts[:6], dtype=FULL, command="decoders train dflash --model tiny"),
            run=run(own_share=1.0, **changes),
        )  # fmt: skip

    before, after = train("a", rate=0.0, epochs=1), train("b", rate=1e-2, epochs=8, tokens=2000)
    assert after["held"]["own"]["tokens_per_step"] > before["held"]["own"]["tokens_per_step"] + 0.2
    assert not (tmp_path / "b" / "training").exists()
    card, numbers = (tmp_path / "b" / "README.md").read_text(), after["test"]["own"]
    for part in ("decoders train dflash --model tiny", f"{numbers['reached'][1]:.1%}", f"{after['steps']} steps"):
        assert part in card
    config = read_config(tmp_path / "b")
    assert config.layers == (0,) and config.places == 4 and config.layer.rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize("vocabulary", [None, 60])
def test_interrupted_run_ends_where_a_whole_one_does(
    tmp_path, model, word_tokenizer, counting_texts, monkeypatch, vocabulary
) -> None:
    def train(name: str, start=None, checkpoint_minutes=1.0, **changes):
        training = run(**{"own_share": 0.0, "draft_vocab": vocabulary, **changes})
        train_dflash(
            model, word_tokenizer,
            Job(counting_texts, tmp_path / name, dtype=FULL, checkpoint_minutes=checkpoint_minutes), run=training, start=start,
        )  # fmt: skip
        files = load_draft_model(tmp_path / name, CPU, FULL)
        return files, {**files.network.state_dict(), **files.head.state_dict()}

    files, whole = train("whole")
    assert (files.vocabulary is None) == (vocabulary is None) == (files.lm_head is None)
    learn = BlockLearner.learn

    def interrupted(self, step):
        if step == 5:
            raise KeyboardInterrupt
        return learn(self, step)

    monkeypatch.setattr(BlockLearner, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train("cut", checkpoint_minutes=0)
    assert not (tmp_path / "cut" / "config.json").exists(), "a half-trained draft model is not offered"
    monkeypatch.undo()
    with monkeypatch.context() as patch:  # what a checkpoint has is not computed again
        patch.setattr("decoders.training.dflash.fit_context", lambda *_: pytest.fail("fitted again"))
        _, cut = train("cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    _, on = train("on", start=tmp_path / "whole", rate=0.0)
    assert all(torch.equal(whole[name], on[name]) for name in whole)
    assert (tmp_path / "on" / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
    for wrong in (dict(block=5), dict(depth=1), dict(rank=5), dict(draft_vocab=50)):
        with pytest.raises(SettingsError, match="only if its shape"):
            train("no", start=tmp_path / "whole", **wrong)


@torch.no_grad()
@pytest.mark.parametrize(
    "rank, head, ids",
    [(6, "vanilla", None), (6, "vanilla", SOME), (6, "rnn", None), (0, "vanilla", None)],
    ids=["dspark", "some tokens", "recurrent head", "dflash"],
)
def test_speculators_reads_what_is_written(tmp_path, model, rank, head, ids) -> None:
    """Its own class gives the same logits for a block."""
    library = pytest.importorskip(
        "speculators", reason="pip install speculators: it brings torchaudio and datasets with it"
    )
    learner = a_learner(model, run(rank=rank, head=head, length=30), ids)
    folder = save(learner, tmp_path, model, ids)
    config = library.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = library.SpeculatorModel.from_pretrained(folder, config=config).float()
    theirs.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
    if ids is None:  # what it takes from the target where it knows its name
        theirs.lm_head.weight.copy_(model.get_output_embeddings().weight)
    text, anchor = learner.train.ids[:1], 19
    lesson = learner.teacher.lesson(learner.train.part(0, 1), ())
    only = torch.zeros(1, 30)
    only[0, anchor] = 1
    hidden, logits, *_ = theirs._backbone_forward(
        lesson.features, text, only, torch.zeros(1, 30, 32), torch.zeros(1, 30, dtype=torch.long), max_anchors=1
    )
    before = text[:, anchor : anchor + 4]
    logits = logits[:, int(not rank) :]  # without a head the place of the last token drafts nothing
    if rank:
        logits = logits + theirs.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden.view(1, 4, -1))
    ours = torch.stack(list(learner._scores(learner.drafted(lesson, text, torch.tensor([[anchor]])), before)), 1)
    torch.testing.assert_close(logits, ours, atol=2e-5, rtol=1e-4)
    kind = json.loads((tmp_path / "config.json").read_text())["speculators_model_type"]
    assert kind == ("dspark" if rank else "dflash")


def test_what_cannot_be_trained_says_why(tmp_path, model, word_tokenizer, counting_texts, monkeypatch) -> None:
    def train(texts=counting_texts, **changes):
        train_dflash(model, word_tokenizer, Job(texts, tmp_path, dtype=FULL), run=run(**changes))

    with pytest.raises(SettingsError, match="the draft vocabulary must have 1 … 128 tokens, not 129"):
        train(draft_vocab=129)
    with pytest.raises(SettingsError, match="a block must have 2 … 12 tokens \\(half a row\\), not 13"):
        run(block=13)
    with pytest.raises(
        SettingsError,
        match="layers must lie in 0 … 0 .inference engines differ in what they take as the last layer.s output., not 1",
    ):
        train(layers=(1,))
    with pytest.raises(
        SettingsError, match="the target has 1 layer, but must have 2 or more, because the last is not read"
    ):
        run().layers_of(1)
    with pytest.raises(TrainingError, match="the text has"):
        train(["w1 w2"])
    monkeypatch.setattr("decoders.training.feature_heads.decoder_layers", lambda model: [])
    with pytest.raises(TrainingError, match="LlamaForCausalLM has no list of decoder layers"):
        train()
    assert not (tmp_path / "config.json").exists()
    assert run().layers_of(2) == (0,) and run().layers_of(6) == (1, 3, 4) and run(layers=(0, -2)).layers_of(6) == (0, 4)


@torch.no_grad()
@pytest.mark.parametrize("depth, origins", [(1, [3]), (2, [0, 3]), (3, [0, 2, 3]), (6, [0, 1, 1, 2, 2, 3])])
def test_a_new_draft_model_begins_as_layers_of_the_target(depth, origins, monkeypatch) -> None:
    """What its context reads says more of their keys and values than the last feature does, and is fitted to these: a step's rows at a
    time, without logits.
    """
    model = tiny_model("llama", num_hidden_layers=4)
    training = run(depth=depth)
    config = block_config(training, layer_config(model, None, depth), training.layers_of(4), 128, MASK)
    network, layers = new_draft_model(model, training, config).network, model.model.layers
    begun = [next(i for i, of in enumerate(layers) if torch.equal(own.mlp.up_proj.weight, of.mlp.up_proj.weight))
             for own in network.layers]  # fmt: skip
    assert begun == origins
    rows = torch.randint(1, 128, (16, 24), generator=torch.Generator().manual_seed(1))
    teacher, texts = Teacher(model, config.layers, False), Texts(rows, torch.full((16,), 24))
    features = teacher.lesson(texts, ()).features
    given: dict[torch.nn.Module, torch.Tensor] = {}
    parts = [part for i in origins for part in (layers[i].self_attn.k_proj, layers[i].self_attn.v_proj)]
    hooks = [
        part.register_forward_hook(lambda of, _, out: given.update({of: out.flatten(0, 1)})) for part in set(parts)
    ]
    model.model(rows)
    for hook in hooks:
        hook.remove()

    def errors() -> list[float]:
        """Of the best that can be made of what is read, by matrix."""
        read = network.fused(features).flatten(0, 1)
        best = (read @ torch.linalg.lstsq(read, given[part]).solution for part in parts)
        return [float((one - given[part]).norm() / given[part].norm()) for one, part in zip(best, parts, strict=True)]

    before = errors()
    sizes: list[int] = []
    model.model.register_forward_pre_hook(lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    monkeypatch.setattr(model.lm_head, "forward", lambda *_: pytest.fail("logits are not read"))
    fit_context(network, teacher, texts, 6)
    assert sizes == 2 * [6, 6, 4]
    after, read = errors(), network.fused(features).flatten(0, 1)
    assert sum(error**2 for error in after) < max(0.9 * sum(error**2 for error in before), 0.05)
    own = [part for layer in network.layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    for one, part, error in zip(own, parts, after, strict=True):
        assert (one(read) - given[part]).norm() / given[part].norm() < error + 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options", "gives"),
    [
        ("granite", {"logits_scaling": 1.005}, False),
        ("granite", {"logits_scaling": 1.0}, True),
        ("gemma2", {"final_logit_softcapping": 50.0}, False),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("phi", {}, True),
    ],
)
def test_logits_that_are_changed_a_little_are_not_what_the_matrix_gives(name, options, gives, dtype) -> None:
    teacher = Teacher(a_model(name, **options).to(dtype), (0,), bf16=False)
    rows = torch.arange(1, 25)[None]
    assert teacher.has_linear_head(rows) is gives


def test_an_output_head_that_adds_to_its_matrix_is_not_its_matrix() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda _, given, logits: logits + 1e-3 * given[0].sum(-1, keepdim=True))
    assert not Teacher(model, (0,), bf16=False).has_linear_head(torch.arange(1, 25)[None])
