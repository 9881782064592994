"""What the API says and takes about users and tokens."""

from __future__ import annotations

import uuid
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class UserOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    name: str
    permissions: list[str]
    created_at: datetime


class UserIn(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "grace", "permissions": ["read", "run"]}]}
    )

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    permissions: list[str]
    password: str | None = Field(None, max_length=1000)


class PermissionsIn(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"permissions": ["read", "run"]}]})

    permissions: list[str]


class PasswordIn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    password: str = Field(max_length=1000)


class UsersOut(BaseModel):
    items: list[UserOut]


class TokenIn(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "laptop"}]})

    name: str = Field(min_length=1, max_length=100)


class TokenOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    name: str
    prefix: str
    created_at: datetime
    last_used_at: datetime | None = Field(description="Last write it was used for, to the minute; reads leave no trace")
    revoked_at: datetime | None


class NewTokenOut(TokenOut):
    token: str | None = Field(description="Shown this once; null when the request is repeated")


class TokensOut(BaseModel):
    items: list[TokenOut]


class LoginLinkOut(BaseModel):
    url: str | None = Field(description="Signs its user in once; null when the request is repeated")
