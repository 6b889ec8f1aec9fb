"""A service's configuration, for the tests."""

from pydantic import Field

from shared.config import ServiceConfig


class GatewayConfig(ServiceConfig):
    """Of a service in these tests."""

    port: int = Field(default=8000, gt=0, lt=65536, description="where HTTP is served")
    names: tuple[str, ...] = ()
    hot: bool = False
    api_key: str = "none"
