"""Which answers of S3 are about credentials, which may pass, and which are for good.

botocore says which codes it tries again, s3fs which of Python's errors it makes of
them; nothing is asked of a server here.
"""

import email.utils
import time

import pytest

from loaderkit.cache.store_answers import (
    check_worth_another_try,
    code_of,
    may_have_lapsed,
)
from loaderkit.errors import CacheError

pytestmark = pytest.mark.needs("s3")

OF_CREDENTIALS = {
    "ExpiredToken": (400, 403),
    "InvalidToken": (400,),
    "TokenRefreshRequired": (400,),
    "InvalidAccessKeyId": (403,),
    "SignatureDoesNotMatch": (403,),
    "AccessDenied": (403,),
    "AllAccessDisabled": (403,),
    "InvalidSecurity": (403,),
    "ExpiredTokenException": (400, 403),
    "RequestExpired": (400,),
    "UnrecognizedClientException": (400, 403),
    "InvalidClientTokenId": (400, 403),
    "AuthFailure": (400, 401),
    # to HEAD
    "400": (400,),
    "403": (403,),
}
FOR_GOOD = {
    "AuthorizationHeaderMalformed": 400,
    "InvalidArgument": 400,
    "KMS.DisabledException": 400,
    "InvalidObjectState": 403,
    "MethodNotAllowed": 405,
    "NotImplemented": 501,
}


def answer(code, status, date_s=None):
    """The error that s3fs raises where S3 answers so."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    date = email.utils.formatdate(time.time() if date_s is None else date_s)
    response = {
        "Error": {"Code": code, "Message": "What it is about."},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {"date": date}},
    }
    error = translate_boto_error(ClientError(response, "GetObject"))
    assert code_of(error) == code
    return error


def told(error, let_in=frozenset(), verb="read"):
    """What is said of an answer at once; None where it is tried again."""
    try:
        check_worth_another_try("s3://b/c", verb, error, let_in)
    except CacheError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (code, status)
        for code, statuses in OF_CREDENTIALS.items()
        for status in statuses
    ],
)
def test_credentials_are_told_at_once_and_read_anew_where_they_have_worked(
    code, status
):
    error = answer(code, status)

    assert "does not let you in" in told(error).why
    assert may_have_lapsed(error)


def codes_that_botocore_tries_again():
    """By status, as AWS sends them."""
    from botocore.retries.standard import (
        ThrottledRetryableChecker,
        TransientRetryableChecker,
    )

    # DynamoDB's and EC2's are no answers of a store.
    others = {
        "ProvisionedThroughputExceededException",
        "TransactionInProgressException",
        "EC2ThrottledException",
    }
    codes = {
        *ThrottledRetryableChecker._THROTTLED_ERROR_CODES,
        *TransientRetryableChecker._TRANSIENT_ERROR_CODES,
    }
    for code in sorted(codes - others):
        yield code, 400
    for status in TransientRetryableChecker._TRANSIENT_STATUS_CODES:
        yield "InternalError", status


def test_what_botocore_tries_again_is_tried_again():
    cases = [*codes_that_botocore_tries_again(), ("BadDigest", 400), ("x", 409)]
    assert len(cases) > 15

    refused = [case for case in cases if told(answer(*case)) is not None]

    assert refused == []
    assert not any(may_have_lapsed(answer(*case)) for case in cases)


@pytest.mark.parametrize("code", FOR_GOOD)
def test_what_is_for_good_and_not_about_credentials_is_told_as_that(code):
    error = answer(code, FOR_GOOD[code])

    assert "refuses the request" in told(error).why
    assert not may_have_lapsed(error)


@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "403", "400"])
def test_a_clock_is_told_also_where_an_answer_has_no_text(code):
    status = 400 if code == "400" else 403
    error = answer(code, status, date_s=time.time() - 3600)

    assert "the clock of this machine" in told(error).why
    assert not may_have_lapsed(error)


@pytest.mark.parametrize(("code", "status"), [("400", 400), ("ExpiredToken", 400)])
def test_who_may_read_and_has_no_valid_token_is_not_told_that_it_may_not_write(
    code, status
):
    error = told(answer(code, status), frozenset({"read"}), "written")
    assert "may read there, and not write" not in error.why


def test_a_server_of_tokens_that_is_busy_is_no_refusal():
    class RefreshError(Exception):  # as google.auth names and marks it
        retryable = True

    assert told(RefreshError("503")) is None
    RefreshError.retryable = False
    assert "does not let you in" in told(RefreshError("revoked")).why
