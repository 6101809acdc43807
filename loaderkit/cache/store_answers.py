"""What an error of a store says: try again, let in or not, there or not.

fsspec's file systems raise what their libraries raise.  An error is read by its HTTP
status and by its name, since these libraries are not imported to find out; a library
more is a name in a table.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import re
import socket
import ssl
import time
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.errors import CacheError, NoAnswerError
from loaderkit.fixes import Fix, Setting
from loaderkit.library_files import where_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

STORAGE_OPTIONS = Setting("storage_options", code="{...}")
NEVER_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_GONE = {_NOT_FOUND, 410}
_WORTH_ANOTHER_TRY = {408, 409, 425, 429}
"""Statuses below 500 that pass: timeouts, conflicts, too many requests."""
_NOT_IMPLEMENTED = {501, 505}
"""A server that cannot do this now cannot do it a moment later."""
_BAD_REQUEST = 400
"""S3 answers so where credentials have expired, and where it was asked too often; its
code says which."""
_CREDENTIAL_CODES = {
    # S3
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidSecurity",
    "RequestTimeTooSkewed",
    # STS, IAM, and what speaks as they do
    "ExpiredTokenException",
    "RequestExpired",
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "IncompleteSignature",
    "MissingAuthenticationToken",
    "AuthFailure",
    "InvalidIdentityToken",
    "IDPCommunicationError",
    # the answer to HEAD has no body, and so no code but its status
    str(_BAD_REQUEST),
}
"""Codes of S3, most of them sent with the status 400."""
_ARCHIVED = "InvalidObjectState"
"""Sent with 403: the file has to be fetched from an archive first."""
_CODES_THAT_PASS = {
    "SlowDown",
    "RequestTimeout",
    "RequestTimeoutException",
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestThrottled",
    "RequestThrottledException",
    "TooManyRequests",
    "TooManyRequestsException",
    "RequestLimitExceeded",
    "LimitExceededException",
    "BandwidthLimitExceeded",
    "PriorRequestNotComplete",
    # another writer has given it up, which holds for this try
    "NoSuchUpload",
    # what was garbled on its way there
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
}
"""The same of what may pass; as botocore has them, whose own tries are fewer."""
_CREDENTIAL_ERRORS = {
    # botocore
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
    "SSOError",
    "LoginError",
    "NoAuthTokenError",
    "RefreshWithMFAUnsupportedError",
    "UnknownCredentialError",
    "ProfileNotFound",
    # google.auth
    "DefaultCredentialsError",
    "RefreshError",
    # azure
    "ClientAuthenticationError",
    # huggingface_hub
    "GatedRepoError",
    "LocalTokenNotFoundError",
    # paramiko, smbprotocol
    "AuthenticationException",
    "LogonFailure",
}
"""Errors by name: their libraries are not imported to find out."""
BUGS = (
    *(TypeError, AttributeError, NameError, ImportError, SyntaxError, AssertionError),
    *(ArithmeticError, BufferError, RecursionError, StopIteration, StopAsyncIteration),
)
"""What code that is wrong raises, and raises again.  No ValueError and no LookupError:
an answer that cannot be parsed, or lacks something, may come whole the next time.  A
list of S3 that goes on, and does not say where, is a KeyError of s3fs."""
_NO_REPOSITORY = {"RepositoryNotFoundError", "BucketNotFoundError"}
"""The Hub's answer to who may not see one, too."""
_WRONG_URL = {
    # huggingface_hub
    "HfUriError",
    "HFValidationError",
    # botocore
    "ParamValidationError",
    "EndpointResolutionError",
    # aiohttp, requests, httpx, http.client
    "InvalidURL",
    "InvalidSchema",
    "MissingSchema",
    "UnsupportedProtocol",
}
"""Errors by name: no request was made."""
_WRONG_ENDPOINT = re.compile(r"Invalid (endpoint|URL|IPv6 URL)|Port out of range")
"""Of the ``ValueError``s of botocore, of yarl and of urllib."""
_REDIRECTS = "TooManyRedirects"
"""So aiohttp, requests and httpx call it."""
_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
"""A name server was asked, and knows no such host.  One that does not answer is
``EAI_AGAIN``."""
_TRIES_OF_UNKNOWN_HOSTS = 3
"""So often a name is looked up that no server knows.  Chosen: 1.5 to 2.3 s, for names
that a cluster gives to what it has just started."""
TRIES_OF_LAPSED_CREDENTIALS = 3
"""So often credentials that have worked are read anew.  Chosen as above: a program that
renews them does so before they expire, and few moments late at most."""
_NO_TLS = {
    "WRONG_VERSION_NUMBER",
    "UNKNOWN_PROTOCOL",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
}
"""What OpenSSL says of an answer that is no TLS, by release."""
_NO_AGREEMENT = {
    "UNSUPPORTED_PROTOCOL",
    "NO_PROTOCOLS_AVAILABLE",
    "TLSV1_ALERT_PROTOCOL_VERSION",
    "SSLV3_ALERT_HANDSHAKE_FAILURE",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED",
    "TLSV1_ALERT_UNKNOWN_CA",
    "TLSV1_UNRECOGNIZED_NAME",
}
"""What OpenSSL says where a server and we have no TLS in common, or it wants to know
who we are."""
_OTHER_PROTOCOLS = re.compile(
    r"""b?['"](SSH-\d|220[ -]|\\x15\\x03|\+OK|\* OK|-ERR|RFB )"""
)
"""How SSH, FTP or SMTP, TLS, POP, IMAP, Redis and VNC begin their answer, in a client's
message that it is no HTTP.  Anything else may be HTTP that was garbled on its way."""
_CA_VARIABLES = {"botocore": "AWS_CA_BUNDLE", "requests": "REQUESTS_CA_BUNDLE"}
"""Which variable names the file of certificates that are trusted, by library."""
_EXPIRED, _NOT_YET_VALID = 10, 9
_OTHER_HOST = {62, 64}
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL."""
_USER_AND_PASSWORD = re.compile(r"""[^\s/@:'"]+:[^\s/@'"]+@""")
"""In front of a host, in a text that names one."""
_OF_CLOCKS = re.compile(
    r"RequestTimeTooSkewed|request time and the current time"
    r"|signature (not yet current|expired)|date header too old",
    re.IGNORECASE,
)
"""What S3, its likes and Azure say to requests whose time is not theirs."""
_MOST_SKEW_S = 900.0
"""What S3 allows between its clock and ours; Azure does, too."""
_MAX_ERROR_LETTERS = 300
"""Of an error's text in a message: some hold a whole page of HTML.  Chosen: four lines
of a terminal."""


def status_of(error: BaseException) -> int | None:
    """Find the HTTP status that an error of any library carries."""
    if type(error.__cause__).__module__.startswith("aiohttp.http"):
        return None  # aiohttp makes 400 of an answer that is no HTTP
    # s3fs raises Python's errors from botocore's, which carry the response.
    for raised in (error, error.__cause__):
        response = getattr(raised, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status if isinstance(status, int) else None
    response = getattr(error, "response", None)
    candidates = [
        getattr(error, "status", None),  # aiohttp
        getattr(error, "status_code", None),  # azure
        getattr(response, "status_code", None),  # requests, huggingface_hub
    ]
    if type(error).__module__.startswith("gcsfs"):
        candidates.append(getattr(error, "code", None))
    for status in candidates:
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


def code_of(error: BaseException) -> str:
    """Find the code by which S3 says what is wrong; "" where there is none."""
    # s3fs raises Python's errors from botocore's, which carry the response.
    for raised in (error, error.__cause__):
        response = getattr(raised, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def what_happened(error: Exception) -> Exception:
    """Give what happened, where a file system says of any failure "not found".

    fsspec's file system of HTTP does, of a server that does not answer too.
    """
    cause = error.__cause__
    if not isinstance(error, NEVER_THERE) or not isinstance(cause, Exception):
        return error
    if isinstance(cause, NEVER_THERE):
        return error
    if _kinds_of(cause) & _NO_REPOSITORY:
        return cause
    status = status_of(cause)
    is_of_network = isinstance(cause, OSError | TimeoutError) or type(
        cause
    ).__module__.startswith("aiohttp")
    if status is None:
        return cause if is_of_network else error
    return error if status in _GONE else cause


class _Hopeless(NamedTuple):
    """Why trying again cannot help, and what can."""

    why: str
    fix: str | Fix


def may_connect_soon(error: BaseException) -> bool:
    """Tell whether what a connection failed by may be gone in a second."""
    return _why_no_connection(error) is None and not _is_unknown_host(error)


def _why_no_connection(error: BaseException) -> _Hopeless | None:
    """Say why there is no connection to a store, and never will be; None if it may."""
    for cause in _causes_of(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _why_no_trust(error)
        # aiohttp's errors are of the class of ssl's, too, and have no reason.
        reason = getattr(cause, "reason", None)
        if isinstance(cause, ssl.SSLError) and reason in _NO_TLS:
            why = "what answers on this port speaks no TLS, the S of HTTPS"
            return _Hopeless(why, "http:// instead of https://, or another port")
        if isinstance(cause, ssl.SSLError) and reason in _NO_AGREEMENT:
            why = "the server refuses our TLS: its version, or that we show no "
            why += "certificate of our own"
            return _Hopeless(why, Fix.of("check the host, and ", STORAGE_OPTIONS))
        if _REDIRECTS in _kinds_of(cause):
            why = "the store sends us from one address to the next, in a circle"
            fix = Fix.of("correct the URL, or ", STORAGE_OPTIONS)
            return _Hopeless(why, fix)
        is_wrong_url = _kinds_of(cause) & _WRONG_URL or (
            isinstance(cause, ValueError) and _WRONG_ENDPOINT.match(str(cause))
        )
        # Python's codec of host names, where a part of one is empty or too long
        if is_wrong_url or isinstance(cause, UnicodeError):
            why = "no request can be made to such an address"
            return _Hopeless(why, Fix.of("correct the URL, or ", STORAGE_OPTIONS))
        if "status line" in str(cause).lower() and _OTHER_PROTOCOLS.search(str(cause)):
            why = "what answers on this port speaks another protocol than HTTP"
            return _Hopeless(why, "correct the port or the protocol of the URL")
    return None


def _why_no_trust(error: BaseException) -> _Hopeless:
    """Say what is wrong with a server's certificate."""
    # aiohttp's own error is of the class of ssl's, and has no code.
    codes = [getattr(cause, "verify_code", None) for cause in _causes_of(error)]
    code = next((code for code in codes if code is not None), None)
    if code in _OTHER_HOST:
        why = "the server's certificate is of another host"
        return _Hopeless(why, "name the host in the URL as its certificate does")
    if code in {_EXPIRED, _NOT_YET_VALID}:
        clock = time.strftime("%Y-%m-%d %H:%M %Z")
        state = "has expired" if code == _EXPIRED else "is not valid yet"
        why = f"the server's certificate {state}, or the clock of this machine is wrong"
        fix = f"a new certificate there, or set the clock, which says {clock}"
        return _Hopeless(why, fix)
    library = type(error).__module__.partition(".")[0]
    variable = _CA_VARIABLES.get(library, "SSL_CERT_FILE")
    why = "nobody whom this machine trusts has signed the server's certificate"
    return _Hopeless(why, f"export {variable}=/path/to/the/signers/certificate.pem")


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """Go through an error and all that it was raised for, however its library says."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        cause = waiting.pop(0)
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [cause.__cause__, cause.__context__]
        waiting += cause.args
        waiting.append(getattr(cause, "reason", None))  # urllib3
        kwargs = getattr(cause, "kwargs", None)
        if isinstance(kwargs, dict):  # botocore
            waiting.append(kwargs.get("error"))


def _is_unknown_host(error: BaseException) -> bool:
    return any(
        isinstance(cause, socket.gaierror) and cause.errno in _NO_SUCH_HOST
        for cause in _causes_of(error)
    )


def check_worth_another_try(
    where: str,
    verb: str,
    error: Exception,
    verbs_let_in: frozenset[str],
    tries: int = 1,
) -> None:
    """Raise what trying again cannot help.

    Args:
        where: The URL.
        verb: What was to be done: "opened", "read", "written" or "removed".
        error: The answer.
        verbs_let_in: What the store has let us do before.
        tries: So often it was tried.

    Raises:
        CacheError: We are not let in, or there is no bucket to write to, or no
            connection.
        FileNotFoundError: It is not there.
    """
    status = status_of(error)
    hopeless = _why_no_connection(error)
    if hopeless is not None:
        message = f"{where} could not be {verb}: {text_of(error)}."
        raise CacheError(message, why=hopeless.why, fix=hopeless.fix) from error
    # A host that has answered before has a name; opening asks most of them nothing.
    has_answered = bool(verbs_let_in - {"opened"})
    is_early = tries < _TRIES_OF_UNKNOWN_HOSTS
    if not has_answered and not is_early and _is_unknown_host(error):
        message = f"{where} could not be {verb}: {text_of(error)}."
        why = f"there is no host of that name, or not yet: looked up {tries} times"
        host = Fix.of("correct the host in the URL, or in ", STORAGE_OPTIONS)
        raise NoAnswerError(message, why=why, fix=host) from error
    if _kinds_of(error) & _NO_REPOSITORY:
        message = f"{where} could not be {verb}: {text_of(error)}."
        why = "there is no such repository, or it is private and not yours to read"
        fix = "hf auth login, hf repos create, or correct the URL"
        raise CacheError(message, why=why, fix=fix) from error
    if is_refusal(error):
        raise _refused_by_store(where, verb, error, verbs_let_in) from error
    if status in _GONE and not may_pass(error):
        raise not_there(where, verb, error) from error
    passes = (
        status is None
        or may_pass(error)
        or (status >= 500 and status not in _NOT_IMPLEMENTED)
        or status in _WORTH_ANOTHER_TRY
    )
    # A file system that lacks a method lacks it the next time too.
    is_lacking = isinstance(error, NotImplementedError)
    if verb == "opened" and type(error) is OSError and error.errno is None:
        # pyarrow's words for a system without Java
        message = f"{where} could not be opened: {text_of(error)}."
        why = (
            "a library that its file system needs is not there, or not as it should be"
        )
        fix = "install what that message names"
        raise CacheError(message, why=why, fix=fix) from error
    if isinstance(error, BUGS) and status is None:
        raise _failed_by_itself(where, verb, error) from error
    if not passes or is_lacking:
        message = f"{where} could not be {verb}: {text_of(error)}."
        why = "the store refuses the request, or its file system cannot do this"
        check = Fix.of("check the URL and ", STORAGE_OPTIONS)
        raise CacheError(message, why=why, fix=check) from error


def _failed_by_itself(where: str, verb: str, error: Exception) -> CacheError:
    """Say that it is the code of a client that failed, and not a request."""
    message = f"{where} could not be {verb}: {text_of(error)}."
    why = f"code failed, and would fail again: {where_raised(error) or 'a client'}"
    fix = "another release of the library that this file is of, or report it there"
    return CacheError(message, why=why, fix=fix)


def _refused_by_store(
    where: str, verb: str, error: Exception, verbs_let_in: frozenset[str]
) -> CacheError:
    """Say that the store does not let us do something."""
    message = f"{where} could not be {verb}: {text_of(error)}."
    if is_of_clocks(error):
        why = "requests are signed with the time, and the clock of this machine, or "
        why += "that of the store, is wrong"
        clock = time.strftime("%Y-%m-%d %H:%M %Z")
        return CacheError(message, why=why, fix=f"set the clock, which says {clock}")
    is_of_rights = "expired" not in text_of(error).lower() and (
        code_of(error) not in _CREDENTIAL_CODES
    )
    if verb == "written" and "read" in verbs_let_in and is_of_rights:
        why = "these credentials may read there, and not write"
        may_write = " with credentials that may write, or another URL"
        fix = Fix.of(STORAGE_OPTIONS, may_write)
        return CacheError(message, why=why, fix=fix)
    why = (
        "the store does not let you in: credentials are missing, expired, or not "
        "allowed to do this"
    )
    fix = Fix.of("log in again, or ", STORAGE_OPTIONS, " with credentials that may")
    return CacheError(message, why=why, fix=fix)


def not_there(where: str, verb: str, error: Exception) -> Exception:
    """Say what is not there: what is to be read, or where it is to be written."""
    if verb == "opened":
        message = f"{where} could not be opened: {text_of(error)}."
        why = "its file system looks for what the URL names when it is opened"
        return CacheError(message, why=why, fix="make it, or correct the URL")
    if verb != "written":
        return FileNotFoundError(errno.ENOENT, text_of(error), where)
    message = f"{where} could not be written: {text_of(error)}."
    why = "there is no such bucket, container or repository, and none is made"
    return CacheError(message, why=why, fix="make it, or correct the URL")


def _kinds_of(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def may_pass(error: BaseException) -> bool:
    """Tell whether S3 says by its code that another try may succeed."""
    return code_of(error) in _CODES_THAT_PASS


def is_of_clocks(error: Exception) -> bool:
    """Tell whether the store refuses a request for the time that it is signed with."""
    if code_of(error).isdecimal():  # HEAD: the answer has no text that says so
        return _seconds_between_clocks(error) > _MOST_SKEW_S
    return _OF_CLOCKS.search(f"{code_of(error)} {error}") is not None


def _seconds_between_clocks(error: BaseException) -> float:
    """Compare the time that stands in an answer with that of this machine."""
    for raised in (error, error.__cause__):
        response = getattr(raised, "response", None)
        if isinstance(response, dict):
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            # No date, or none that can be read.
            with contextlib.suppress(ValueError, TypeError):
                date = email.utils.parsedate_to_datetime(headers.get("date"))
                return abs(date.timestamp() - time.time())
    return 0.0


def may_have_lapsed(error: Exception) -> bool:
    """Tell whether a store that has let us in might do so again with new credentials.

    They are read anew with each try: what renews them writes them to a file, or gives
    them when it is asked.
    """
    return is_refusal(error) and not is_of_clocks(error)


def is_refusal(error: Exception) -> bool:
    """Tell whether the store does not let us in."""
    # google.auth says so where it is the server of tokens that is busy.
    if getattr(error, "retryable", False) is True:
        return False
    status, code = status_of(error), code_of(error)
    # s3fs makes a PermissionError of what no credentials help against, too.
    is_of_rights = status in {None, _UNAUTHORIZED, _FORBIDDEN}
    is_refused = isinstance(error, PermissionError) and is_of_rights
    is_refused = is_refused or bool(_kinds_of(error) & _CREDENTIAL_ERRORS)
    is_refused = is_refused or code in _CREDENTIAL_CODES
    # FTP's "not logged in"; ftplib has one class for all that is refused for good.
    is_refused = is_refused or str(error).startswith("530 ")
    is_refused = is_refused or status in {_UNAUTHORIZED, _FORBIDDEN}
    return is_refused and code != _ARCHIVED


def gave_up(where: str, verb: str, error: Exception, tries: int) -> CacheError:
    """Say that something failed too often.

    Args:
        where: The URL.
        verb: What was to be done: "opened", "read", "written" or "removed".
        error: How it failed last.
        tries: How often it was tried.
    """
    message = f"{where} could not be {verb}: {text_of(error)}."
    if is_refusal(error):
        why = (
            "the store let you in before: credentials have expired or were withdrawn, "
            f"and {tries} tries found no others; what was read is kept"
        )
        fix = "log in again, and run the same again: it goes on there"
        return CacheError(message, why=why, fix=fix)
    failed = "gave no answer" if is_timeout(error) else "failed"
    why = f"the store {failed} {tries} times in a row; what was read is kept"
    fix = "check the network and the store, and run the same again: it goes on there"
    if verb == "opened":
        why = f"the store {failed} {tries} times in a row"
        fix = "check the host that the URL names, and the network"
    return NoAnswerError(message, why=why, fix=fix)


def is_timeout(error: Exception) -> bool:
    """Tell whether an answer did not come in time."""
    return isinstance(error, TimeoutError) or "Timeout" in type(error).__name__


def text_of(error: BaseException) -> str:
    """Say what an error is, on one line, without a password; some have no text."""
    text = _USER_AND_PASSWORD.sub("", " ".join(str(error).split()))
    name = type(error).__name__
    return f"{name}: {text[:_MAX_ERROR_LETTERS]}" if text else name
