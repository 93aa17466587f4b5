"""Object stores in place of local folders. Input: `s3://BUCKET/KEY`, `gs://BUCKET/KEY` or
`msc://PROFILE/KEY`. Output: `RemotePath`, with the interface of `pathlib.Path`.

    as_path          string or path to Path; RemotePath for these schemes (path.py)
    RemotePath       names are computed without requests; `stat`, `open`, `iterdir` and `glob` send requests, and so do
                     the writing methods: an object has its old content or all of the new content (path.py)
    RemoteReader     the stream of `RemotePath.open`: reads byte ranges, and never the whole object (reader.py)
    energon_url      RemotePath to the URL by which Energon opens the same object (path.py)
    recent_status    the status of an object, at most a minute old (status.py)
    map_paths        a function of paths to its results; of objects, several at a time (grouped_requests.py)
    statuses         paths to the status of each; of objects, from a listing of their folder (grouped_requests.py)
    read_ranges      byte ranges of objects to their bytes, with few requests (grouped_requests.py)
    request_objects  requests objects at the same time, before each is read (grouped_requests.py)
    ReadAhead        reads values in threads before they are needed (threads.py)
    StorageError     the store refuses or fails a request (clients.py)

Requests are sent by multi-storage-client, as in Megatron-Energon: both use the same configuration (`MSC_CONFIG`, or
~/.msc_config.yaml) and the same credentials. Without a configuration, `s3://` uses the credentials, region and
endpoint of boto3 (such as AWS_ACCESS_KEY_ID, AWS_PROFILE and AWS_ENDPOINT_URL). The client retries requests; its
cache of clients is emptied after a fork, so that no connection is shared. rust_client.py sends the requests of
profiles with `rust_client`.

A key is a path: keys with `//`, `/./` or a trailing slash cannot be named.
"""

from energon_packed.storage.clients import StorageError
from energon_packed.storage.grouped_requests import MOST_TOGETHER, map_paths, read_ranges, request_objects, statuses
from energon_packed.storage.path import RemotePath, absolute_name, as_path, energon_url, is_remote
from energon_packed.storage.reader import READ_AHEAD, RangeStream, RemoteReader
from energon_packed.storage.status import recent_status, stamp_of
from energon_packed.storage.threads import ReadAhead, locked

__all__ = [
    "MOST_TOGETHER",
    "READ_AHEAD",
    "RangeStream",
    "ReadAhead",
    "RemotePath",
    "RemoteReader",
    "StorageError",
    "absolute_name",
    "as_path",
    "energon_url",
    "is_remote",
    "locked",
    "map_paths",
    "read_ranges",
    "recent_status",
    "request_objects",
    "stamp_of",
    "statuses",
]
