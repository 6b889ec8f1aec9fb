"""Configuration: one frozen model per service, read once at start (`shared.config.loading`)."""

from shared.config.loading import ENV_CONFIG_FILE, SHARED_SETTINGS, check_setting, load, load_with_origins
from shared.config.models import ENV_PREFIX, BusConfig, ModelServiceConfig, ServiceConfig, TracesConfig

__all__ = [
    "ENV_CONFIG_FILE",
    "ENV_PREFIX",
    "SHARED_SETTINGS",
    "BusConfig",
    "ModelServiceConfig",
    "ServiceConfig",
    "TracesConfig",
    "check_setting",
    "load",
    "load_with_origins",
]
