"""Whether a constraint can be served: checked before anything is computed for it.

Pure but for the library that parses grammars.
"""

from llguidance import LLMatcher

from core.errors import InvalidRequest
from core.sampling import Constraint, ConstraintKind, Sampling

MAX_CHARACTERS = 65_536
MAX_SHOWN_CHARACTERS = 400


def check_constraint(asked: Sampling, eos_token_ids: tuple[int, ...]) -> None:
    """Refuse a constraint that is none, or that could not end the answer.

    Contract: may block for a second on a large grammar; thread-safe.
    """
    constraint = asked.constraint
    if constraint is None:
        return
    field = f"constraint.{constraint.kind}"
    if len(constraint.text) > MAX_CHARACTERS:
        limit = f"at most {MAX_CHARACTERS} are taken"
        raise InvalidRequest(field, f"{len(constraint.text)} characters", limit)
    if not eos_token_ids:
        raise InvalidRequest(field, "set", "this checkpoint has no end-of-sequence token")
    if asked.ignore_eos:
        raise InvalidRequest("ignore_eos", True, f"{field} ends with the end-of-sequence token")
    if asked.min_tokens:
        raise InvalidRequest("min_tokens", asked.min_tokens, f"{field} decides when it is complete")
    problem = _problem(constraint)
    if problem:
        shown = " ".join(problem.split())[:MAX_SHOWN_CHARACTERS]
        raise InvalidRequest(field, "not usable", shown)


def _problem(constraint: Constraint) -> str:
    """Why the constraint cannot be used; empty if it can."""
    try:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                grammar = LLMatcher.grammar_from_json_schema(constraint.text)
            case ConstraintKind.REGEX:
                grammar = LLMatcher.grammar_from_regex(constraint.text)
            case ConstraintKind.LARK:
                grammar = LLMatcher.grammar_from_lark(constraint.text)
    except ValueError as error:
        return str(error)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else ""
