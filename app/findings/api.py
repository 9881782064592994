"""REST: findings of the detectors."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query

from app.findings import service
from app.findings.schemas import FindingOut, FindingsOut
from app.idempotency import ApiRoute
from app.runs.service import get_run
from app.security import Reader
from app.sessions import ReadSession

router = APIRouter(prefix="/findings", tags=["findings"], route_class=ApiRoute)


@router.get("", response_model=FindingsOut)
def list_findings(
    _: Reader,
    session: ReadSession,
    run: str | None = Query(None, description="Number or id; all runs without one"),
    open: bool = Query(False, description="Only those that still hold"),
    limit: int = Query(100, ge=1, le=200),
    cursor: str | None = None,
) -> dict[str, Any]:
    """What the detectors concluded, newest first, each with evidence and remedy."""
    found = get_run(session, run) if run else None
    page = service.list_findings(session, found, only_open=open, limit=limit, cursor=cursor)
    return {"items": [_out(view) for view in page.items], "next_cursor": page.next_cursor}


def _out(view: service.FindingView) -> FindingOut:
    row = view.finding
    own = {name: getattr(row, name) for name in FindingOut.model_fields if hasattr(row, name)}
    return FindingOut(**own, run_number=view.run_number, attempt=view.attempt)
