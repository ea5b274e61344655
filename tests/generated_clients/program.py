"""A TypeScript program that makes each step through ``openapi-fetch``, typed by the generated schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.generated_clients.steps import Step

_HEAD = """
import createClient from "openapi-fetch";
import type { paths } from "./schema";

declare const process: { argv: string[]; env: Record<string, string> };

const client = createClient<paths>({
  baseUrl: process.argv[2],
  headers: { "X-Tersely-Key": process.env.TERSELY_KEY },
});
const answers: Record<string, { status: number; body: unknown }> = {};
"""
# The assignment to `typed` compiles only where the inferred type of the answer is the described one.
_CALL = """
{{
  const {{ data, error, response }} = await client.{method}("{path}", {{{options}}});
  const typed: {kind} | undefined = data;
  answers["{operation}"] = {{ status: response.status, body: typed ?? error ?? null }};
}}
"""
_TAIL = "\nconsole.log(JSON.stringify(answers));\n\nexport {};\n"


def write_program(steps: Sequence[Step], document: Mapping[str, Any]) -> str:
    """Return the program's text."""
    return _HEAD + "".join(_call(step, document) for step in steps) + _TAIL


def _call(step: Step, document: Mapping[str, Any]) -> str:
    responses = document["paths"][step.path][step.method]["responses"]
    (status,) = [each for each in responses if each.startswith("2")]
    media = next(iter(responses[status].get("content", {})), None)
    parameters = {place: values for place, values in (("path", step.path_values), ("query", step.query)) if values}
    options = [f"params: {json.dumps(parameters)}"] if parameters else []
    if step.body is not None:
        options.append(f"body: {json.dumps(step.body)}")
    if media is not None and media != "application/json":
        options.append('parseAs: "text"')
    place = f'paths["{step.path}"]["{step.method}"]["responses"][{status}]'
    return _CALL.format(
        method=step.method.upper(),
        path=step.path,
        options=", ".join(options),
        kind=f'{place}["content"]["{media}"]' if media else "undefined",
        operation=step.operation_id,
    )
