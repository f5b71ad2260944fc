"""The format of log lines: text, or JSON. They hold numbers and names, never a prompt or an answer."""

import json
import logging
import os
import sys
import time
from typing import Any

FORMAT = "ANABRANCH_LOG_FORMAT"
"""Environment variable, text or json: passes the format on to child processes."""


class TextLines(logging.Formatter):
    """`12:34:56 INFO request id=… status=200 …`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = super().format(record)
        return " ".join([line, *(f"{name}={value}" for name, value in fields.items())])


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(style: str = "", level: int = logging.INFO) -> None:
    """Log to standard error only. Without a style: in that of the parent process."""
    style = os.environ[FORMAT] = style or os.environ.get(FORMAT, "text")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
