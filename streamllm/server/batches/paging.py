"""Rows of a table, a page at a time, in the shape of OpenAI's lists."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.server.query import Page


def select_page(
    connection: sqlite3.Connection, table: str, columns: str, page: Page, where: dict[str, Any]
) -> tuple[list[Sequence[Any]], bool]:
    """Rows of a table with the columns ``number`` (in order of creation) and ``id``.

    Args:
        where: column -> the value it must have.

    Returns:
        The rows of the page, and whether there are more.

    Raises:
        InvalidRequestError: ``after`` names nothing in the list.
    """
    condition = " AND ".join(f"{name} = ?" for name in where)
    values = list(where.values())
    if page.after is not None:
        row = connection.execute(
            f"SELECT number FROM {table} WHERE id = ? AND {condition}", [page.after, *values]
        ).fetchone()
        if row is None:
            raise InvalidRequestError(f"after names nothing in this list: {page.after[:100]}.", param="after")
        condition += f" AND number {'>' if page.ascending else '<'} ?"
        values.append(row[0])
    rows = connection.execute(
        f"SELECT {columns} FROM {table} WHERE {condition} ORDER BY number "
        f"{'ASC' if page.ascending else 'DESC'} LIMIT ?",
        [*values, page.limit + 1],
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit


def list_body(
    objects: Sequence[Any], has_more: bool, show: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """A list in OpenAI's shape."""
    data = [show(each) for each in objects]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
