"The parser that follows a grammar: its table, its loss and its search against slow forms."
import math

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from rvnnbook.data.algorithms import END, START
from rvnnbook.data.batches import Vocabulary
from rvnnbook.data.grammar import LAMBDA, PROLOG, REDUCE, actions_of, read_lambda, tree_of, write_lambda
from rvnnbook.encoders.self_iru import IRU
from rvnnbook.tasks.parser import (
    ActionTable,
    ParseExample,
    Parser,
    advance,
    answer_trees,
    collate_parses,
    open_root,
    search_actions,
    parser_loss,
    predict_actions,
)
from tests.test_grammar import BOTH

FORMULAS = ["( lambda $0 e ( and ( river:t $0 ) ( loc:t $0 s0 ) ) )", "( count $0 ( not ( river:t $0 ) ) )", "s0"]
WORDS = Vocabulary(("UNKNOWN", *"abcdef"), "UNKNOWN")
TABLE = ActionTable(LAMBDA, ["$0", "e", "river:t", "loc:t", "s0"])
EXAMPLES = [ParseExample(tuple(question), actions_of(read_lambda(text.split()), LAMBDA)) for question, text in zip(("abcde", "cab", "f"), FORMULAS)]
UNITS = {"lstm": lambda: None, "linear": lambda: IRU(16, 1, "linear"), "base lstm": lambda: IRU(16, 1, "lstm"), "deep": lambda: IRU(16, 2, "linear")}
SMALL = {"Leaf": ("expr", "var name"), "List": ("expr", "expr* parts"), "Pair": ("expr", "expr left", "var name")}


def make(unit="lstm", parents=True, seed=0, **options):
    torch.manual_seed(seed)
    return Parser(len(WORDS), TABLE, 16, UNITS[unit](), parents, **options).double()


def batch_of(examples=EXAMPLES):
    return collate_parses(examples, WORDS, TABLE)


def paths(table, longest):
    "All complete sequences of at most so many actions, as the table allows them."
    done, begun = [], [([], open_root(table, 1, longest + 9))]
    while begun:
        names, fields = begun.pop()
        field = fields.stack.gather(1, fields.top)[0, 0]
        for action in table.allowed[field].nonzero()[:, 0].tolist():
            if action == END:
                done.append(names)
            elif len(names) < longest:
                begun.append(([*names, action], advance(table, fields, torch.tensor([action]), len(names))))
    return done


# ---- the table

@settings(max_examples=60, deadline=None)
@given(BOTH)
def test_the_stack_follows_the_actions_of_every_tree(drawn):
    tree, (grammar, _, _) = drawn
    actions = actions_of(tree, grammar)
    symbols = sorted({action.name for action in actions} - {*grammar, REDUCE})
    table = ActionTable(grammar, symbols)
    fields = open_root(table, 1, len(actions) + 9)
    for step, action in enumerate(actions):
        place, number = fields.top[0, 0], table.number(action)
        field = fields.stack[0, place]
        assert table.fields[field] == action.field and fields.parents[0, place] == action.parent
        assert table.allowed[field, number] and table.names[number] == action.name
        fields = advance(table, fields, torch.tensor([number]), step)
    assert fields.stack[0, fields.top[0, 0]] == 0
    again = advance(table, fields, torch.tensor([END]), len(actions))
    assert again.stack[0, again.top[0, 0]] == 0, "a complete tree stays complete"


@pytest.mark.parametrize("grammar", [LAMBDA, PROLOG, SMALL])
def test_fields_of_types_take_rules_and_others_take_symbols(grammar):
    table = ActionTable(grammar, ["x", "y"])
    for field, fits in zip(table.fields[1:], table.allowed[1:]):
        names = {table.names[number] for number in fits.nonzero()[:, 0].tolist()}
        kind = field.split()[0].rstrip("*")
        rules = {name for name, (of, *_) in grammar.items() if of == kind}
        assert names == (rules | ({REDUCE} if "*" in field else set()) if rules else {"UNKNOWN", "x", "y"})
    assert not table.allowed[:, START].any() and table.allowed[:, END].nonzero().tolist() == [[0]]


def test_only_well_formed_trees_are_complete():
    table = ActionTable(SMALL, ["x"])
    found = paths(table, 7)
    trees = [tree_of([table.names[number] for number in numbers], SMALL) for numbers in found]
    assert len(found) > 40 and len({str(tree) for tree in trees}) == len(found)


def test_a_symbol_without_a_number_is_unknown():
    action, = [action for action in EXAMPLES[0].actions if action.name == "loc:t"]
    assert TABLE.number(action._replace(name="elsewhere")) == TABLE.first_symbol
    assert TABLE.names[TABLE.first_symbol] == "UNKNOWN" and TABLE.names[TABLE.number(action)] == "loc:t"


# ---- scores and loss

@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("parents", [True, False])
def test_scores_do_not_depend_on_the_rest_of_the_batch(unit, parents):
    model = make(unit, parents)
    together = predict_actions(model, batch_of())
    for row, example in enumerate(EXAMPLES):
        alone = predict_actions(model, batch_of([example]))[0]
        assert_close(together[row, :len(alone)], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("parents", [True, False])
def test_an_action_has_no_influence_on_the_scores_before_it(parents):
    model, batch = make(parents=parents), batch_of(EXAMPLES[:1])
    logs = predict_actions(model, batch)
    for t in (1, 6, 12):
        changed = batch._replace(actions=batch.actions.clone())
        changed.actions[0, t] = TABLE.first_symbol
        found = predict_actions(model, changed)
        assert torch.equal(found[:, :t + 1], logs[:, :t + 1]) and not torch.allclose(found[:, t + 1], logs[:, t + 1])


def test_the_parent_state_is_that_of_the_step_that_opened_the_field():
    model, batch = make(parents=True), batch_of(EXAMPLES[:1])
    logs = predict_actions(model, batch)
    changed = batch._replace(parents=batch.parents.clone())
    changed.parents[0, 9] = 1
    found = predict_actions(model, changed)
    assert torch.equal(found[:, :9], logs[:, :9]) and not torch.allclose(found[:, 9], logs[:, 9])
    assert not torch.equal(predict_actions(model, batch._replace(fields=batch.fields.flip(1))), logs)
    free = make(parents=False)
    assert torch.equal(predict_actions(free, batch), predict_actions(free, changed))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_is_the_cross_entropy_with_smoothed_symbols(smoothing):
    model, batch = make(), batch_of()
    logs, total = predict_actions(model, batch).detach(), 0.0
    for row, example in enumerate(EXAMPLES):
        for t, action in enumerate(example.actions):
            target = torch.zeros(len(TABLE.names)).double()
            number = TABLE.number(action)
            if number > TABLE.first_symbol:
                target[TABLE.first_symbol + 1:] = smoothing / (len(TABLE.symbols) - 1)
                number_weight = 1 - smoothing
            else:
                number_weight = 1.0
            target[number] = number_weight
            assert math.isclose(target.sum(), 1)
            total -= float((target * logs[row, t].clamp(min=-1e9)).sum())
    assert math.isclose(parser_loss(model, batch, smoothing).item(), total / 3, rel_tol=1e-12)


@pytest.mark.parametrize("unit", UNITS)
def test_gradients_in_double_precision(unit):
    model, batch = make(unit), batch_of()
    weights = [model.decoder.actions.weight, model.encoder.words.weight, model.decoder.fields.weight]
    loss = parser_loss(model, batch)
    slopes = torch.autograd.grad(loss, weights)
    for weight, slope in zip(weights, slopes):
        torch.manual_seed(1)
        direction = torch.randn_like(weight)
        direction[:1] = 0                        # START and field 0 have no gradient
        with torch.no_grad():
            sides = []
            for size in (1e-5, -1e-5):
                weight += size * direction
                sides.append(parser_loss(model, batch).item())
                weight -= size * direction
        assert math.isclose((sides[0] - sides[1]) / 2e-5, float((slope * direction).sum()), rel_tol=1e-6, abs_tol=1e-9)


def test_dropout_acts_in_training_alone():
    model, batch = make(dropout=.5), batch_of()
    with torch.no_grad():
        assert len({float(parser_loss(model.train(), batch)) for _ in range(4)}) == 4
        assert len({float(parser_loss(model.eval(), batch)) for _ in range(3)}) == 1


# ---- search

def greedy(model, ids, longest):
    "The best fitting action at each step, each time from the whole sequence so far."
    numbers, fields, opened = [], open_root(TABLE, 1, longest + 9), []
    while len(numbers) < longest:
        opened.append((fields.stack.gather(1, fields.top)[0, 0], fields.parents.gather(1, fields.top)[0, 0]))
        if opened[-1][0] == 0:
            return numbers
        example = batch_of(EXAMPLES[:1])._replace(
            ids=ids, mask=torch.ones_like(ids).bool(), actions=torch.tensor([[*numbers, 0]]),
            fields=torch.stack([field for field, _ in opened])[None], parents=torch.stack([parent for _, parent in opened])[None])
        logs = predict_actions(model, example)[0, -1].masked_fill(~TABLE.allowed[opened[-1][0]], -math.inf)
        numbers.append(int(logs.argmax()))
        fields = advance(TABLE, fields, torch.tensor(numbers[-1:]), len(numbers) - 1)
    return numbers if fields.stack.gather(1, fields.top)[0, 0] == 0 else None


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("parents", [True, False])
def test_a_beam_of_one_is_greedy(unit, parents):
    complete = 0
    for seed in range(4):
        model, batch = make(unit, parents, seed).eval(), batch_of()
        found = search_actions(model, batch.ids, batch.mask, 25, beam=1).words[:, 0].tolist()
        for row, (ids, mask) in enumerate(zip(batch.ids, batch.mask)):
            with torch.no_grad():
                expected = greedy(model, ids[mask][None], 25)
            if expected is not None:
                complete += 1
                assert found[row][:len(expected)] == expected and set(found[row][len(expected):]) <= {END}
            else:
                assert END not in found[row]
    assert complete


@pytest.mark.parametrize("parents", [True, False])
def test_a_wide_search_finds_the_best_of_all_trees(parents):
    table = ActionTable(SMALL, ["x", "y"])
    all_paths = paths(table, 6)
    for seed in range(3):
        torch.manual_seed(seed)
        model = Parser(len(WORDS), table, 16, None, parents).double().eval()
        ids = torch.tensor([[1, 2, 3]])
        found = search_actions(model, ids, ids > 0, 6, beam=400)
        sums = []
        for numbers in all_paths:
            example = ParseExample(tuple("abc"), actions_of(tree_of([table.names[number] for number in numbers], SMALL), SMALL))
            batch = collate_parses([example], WORDS, table)
            batch = batch._replace(actions=torch.tensor([numbers]))          # UNKNOWN has a name of its own
            with torch.no_grad():
                sums.append(float(predict_actions(model, batch).gather(2, batch.actions[..., None]).sum()))
        assert math.isclose(float(found.logs[0, 0]), max(sums), rel_tol=1e-12)
        best = all_paths[sums.index(max(sums))]
        assert found.words[0, 0, :len(best)].tolist() == best


def test_hypotheses_keep_their_states_when_the_beam_is_reordered():
    checked = 0
    for seed in range(4):
        model, batch = make(seed=seed).eval(), batch_of()
        found = search_actions(model, batch.ids, batch.mask, 40, beam=6)
        for row, example in enumerate(EXAMPLES):
            for words, log in zip(found.words[row].tolist(), found.logs[row].tolist()):
                if END in words and log > -math.inf:
                    tree = tree_of([TABLE.names[word] for word in words[:words.index(END)]], LAMBDA)
                    alone = batch_of([ParseExample(example.tokens, actions_of(tree, LAMBDA))])
                    alone = alone._replace(actions=torch.tensor([words[:words.index(END)]]))
                    with torch.no_grad():
                        logs = predict_actions(model, alone).gather(2, alone.actions[..., None])
                    assert math.isclose(float(logs.sum()), log, rel_tol=1e-9)
                    checked += 1
    assert checked > 8


@pytest.mark.parametrize("unit", UNITS)
def test_answers_do_not_depend_on_the_rest_of_the_batch(unit):
    model, batch = make(unit), batch_of()
    together = answer_trees(model, batch, 30, beam=3)
    assert together == [answer_trees(model, batch_of([example]), 30, beam=3)[0] for example in EXAMPLES]


def test_an_answer_that_is_not_complete_is_none():
    model, batch = make(), batch_of()
    assert answer_trees(model, batch, 1, beam=2) == [None] * 3, "the shortest tree has two actions"


def test_training_learns_the_formulas_of_two_questions():
    torch.manual_seed(0)
    model, batch = Parser(len(WORDS), TABLE, 32), batch_of()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        parser_loss(model, batch).backward()
        optimizer.step()
    found = answer_trees(model, batch, 40)
    assert [write_lambda(tree) for tree in found] == [tuple(text.split()) for text in FORMULAS]
