"Grammars of logical forms: formulas, trees and actions are three forms of the same thing."
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvnnbook.data.grammar import (
    LAMBDA,
    PROLOG,
    REDUCE,
    ROOT,
    GrammarError,
    actions_of,
    field_type,
    read_lambda,
    read_prolog,
    tree_of,
    write_lambda,
    write_prolog,
)

PREDICATES = st.sampled_from(["river:t", "loc:t", "from", "size:i"])
VARIABLES = st.sampled_from(["$0", "$1"])


def lambda_nodes(part):
    "Inner nodes whose subtrees are drawn from `part`."
    lists = st.lists(part, max_size=3)
    return st.one_of(
        st.tuples(st.just("Apply"), PREDICATES, lists),
        st.tuples(st.sampled_from(["And", "Or"]), lists), st.tuples(st.just("Not"), part),
        st.tuples(st.just("Lambda"), VARIABLES, st.sampled_from("ei"), part),
        st.tuples(st.sampled_from(["Argmax", "Argmin", "Sum"]), VARIABLES, part, part),
        st.tuples(st.sampled_from(["Count", "Exists", "Max", "Min", "The"]), VARIABLES, part),
        st.tuples(st.just("Compare"), st.sampled_from("<=>").map(lambda sign: (sign,)), part, part))


def prolog_nodes(part):
    return st.one_of(st.tuples(st.just("And"), st.lists(part, min_size=2, max_size=3)), st.tuples(st.just("Or"), part, part),
                     st.tuples(st.just("Not"), part))


ARGUMENTS = st.one_of(st.tuples(st.just("Variable"), st.sampled_from(["ANS", "X"])), st.tuples(st.just("Literal"), st.sampled_from(["areaid0", "20"])))
LAMBDA_TREES = st.recursive(st.one_of(
    st.tuples(st.just("Variable"), VARIABLES), st.tuples(st.just("Entity"), st.sampled_from(["s0", "usa:co", "early:pd"])),
    st.tuples(st.just("Number"), st.sampled_from(["0:i", "9:hr"]))), lambda_nodes, max_leaves=12)
PROLOG_TREES = st.recursive(st.tuples(st.just("Apply"), st.sampled_from(["job", "area"]), st.lists(ARGUMENTS, min_size=1, max_size=3)),
                            prolog_nodes, max_leaves=12)
BOTH = st.one_of(st.tuples(LAMBDA_TREES, st.just((LAMBDA, read_lambda, write_lambda))),
                 st.tuples(PROLOG_TREES, st.just((PROLOG, read_prolog, write_prolog))))


def nodes(part):
    "All nodes of a tree."
    if isinstance(part, list):
        return [node for child in part for node in nodes(child)]
    return [part, *nodes(list(part[1:]))] if isinstance(part, tuple) else []


@given(BOTH)
def test_a_written_formula_reads_as_the_same_tree(drawn):
    tree, (_, read, write) = drawn
    symbols = write(tree)
    assert read(symbols) == tree and symbols.count("(") == symbols.count(")")


@given(BOTH)
def test_actions_rebuild_the_tree(drawn):
    tree, (grammar, _, _) = drawn
    names = [action.name for action in actions_of(tree, grammar)]
    assert tree_of(names, grammar) == tree
    for end in range(len(names)):
        with pytest.raises(GrammarError, match="not complete"):
            tree_of(names[:end], grammar)
    with pytest.raises(GrammarError, match="before the last 1 actions"):
        tree_of([*names, names[0]], grammar)


@given(BOTH)
def test_every_action_fills_a_field_of_its_parent(drawn):
    tree, (grammar, _, _) = drawn
    actions = actions_of(tree, grammar)
    types = {kind for kind, *_ in grammar.values()}
    assert actions[0].field == ROOT and actions[0].parent == 0
    for step, action in enumerate(actions[1:], 1):
        assert action.parent < step and action.field in grammar[actions[action.parent].name][1:]
        if action.name == REDUCE:
            assert "*" in action.field
        elif field_type(action.field) in types:
            assert grammar[action.name][0] == field_type(action.field)
    inner = nodes(tree)
    assert actions[0].name == tree[0]
    assert len(actions) == len(inner) + sum(isinstance(child, (str, list)) for node in inner for child in node[1:])


@pytest.mark.parametrize("formula", ["", "(", "( count $0 )", "( lambda $0 e", "( count $0 s0 s1 )", "s0 s1", "( not s0 ) )", "( < 1:i )"])
def test_malformed_lambda_calculus_is_refused(formula):
    with pytest.raises(GrammarError):
        read_lambda(formula.split())


@pytest.mark.parametrize("formula", ["", "job", "job (", "job ( A", "job ( A ) ,", "( job ( A )", "job ( A ) )", "\\+", "job ( A ) ; ", "job ( A ) job ( A )"])
def test_malformed_prolog_is_refused(formula):
    with pytest.raises(GrammarError):
        read_prolog(formula.split())


@pytest.mark.parametrize("names", [["Literal", "a"], [REDUCE], ["Not", "Literal", "a"], ["Apply", "job", "Not"]])
def test_actions_that_do_not_fit_are_refused(names):
    with pytest.raises(GrammarError):
        tree_of(names, PROLOG)


def test_prolog_binds_the_comma_more_tightly_than_the_semicolon():
    a, b, c = (("Apply", name, [("Variable", "X")]) for name in "abc")
    assert read_prolog("a ( X ) , b ( X ) ; c ( X )".split()) == ("Or", ("And", [a, b]), c)
    assert read_prolog("a ( X ) , ( b ( X ) ; c ( X ) )".split()) == ("And", [a, ("Or", b, c)])
    assert read_prolog("\\+ a ( X ) , b ( X )".split()) == ("And", [("Not", a), b])
    assert read_prolog("a ( X ) ; b ( X ) ; c ( X )".split()) == ("Or", a, ("Or", b, c))
