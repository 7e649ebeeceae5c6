"""What a configuration says of TLS: whether processes know each other by certificates.

`temporary` makes a certificate for each trial. With `off` what Dask's own configuration says holds,
which is no TLS unless it requires encryption; it is the default of a deployment that is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, ValidationInfo, model_validator

from dps.errors import ConfigurationError
from flows.config.base import InputPath, Section, is_of_record
from flows.config.errors import refuse
from flows.quoting import quoted

if TYPE_CHECKING:
    from distributed.security import Security


class CertificateSection(Section):
    """A certificate of the user's own: files in PEM format; the key may be in that of `cert`."""

    ca_file: InputPath
    cert: InputPath
    key: InputPath | None = None

    @model_validator(mode="after")
    def _go_together(self, info: ValidationInfo) -> CertificateSection:
        if is_of_record(info):
            return self
        try:
            self.build()
        except ConfigurationError as error:
            key, _, reason = str(error).partition(": ")
            refuse(reason, key=key)
        return self

    def build(self) -> Security:
        """Return the certificate for all processes of a cluster."""
        from dps.cluster.backends.tls import from_files

        return from_files(self.ca_file, self.cert, self.key)


def _some_form(tls: Any) -> Any:
    if tls is False:  # how YAML reads an off without quotes
        return "off"
    if tls not in ("off", "temporary") and not isinstance(tls, dict | CertificateSection):
        refuse(f"expected off, temporary, or {{ca_file: …, cert: …, key: …}}; got {quoted(tls)}")
    return tls


def _form_of(tls: Any) -> str:
    return "own" if isinstance(tls, dict | CertificateSection) else "word"


Tls = Annotated[
    Annotated[Literal["off", "temporary"], Tag("word")] | Annotated[CertificateSection, Tag("own")],
    Discriminator(_form_of),
    BeforeValidator(_some_form),
]


def security_of(tls: Tls) -> Security | None:
    """Return what the processes of a cluster know each other by; None: what Dask says."""
    if isinstance(tls, CertificateSection):
        return tls.build()
    if tls == "off":
        return None
    from dps.cluster.backends.tls import temporary

    return temporary()
