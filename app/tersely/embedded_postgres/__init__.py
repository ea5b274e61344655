"""A private Postgres of Tersely's own, for services without a configured server.

The binaries come from a wheel; this package starts, joins, watches and stops the server. Several processes may use one
data directory: the first starts the server, the others join it, and the last one stops it. A server that a killed
process left running is joined by the next process, which then stops it at its own end.

On disk, below the data directory:

    postgres/                    the service user's; locks and the server's log
        service.lock             held, shared, by every process that uses the server
        start.lock               held, exclusively, while a server is started, joined or left
        server.log, server.log.1
        cluster-18/              the server account's: the database files
        cluster-16.old/          what was taken over from an older version, until somebody removes it
        cluster-18.lock          held by the server's own processes, all of them
        run/                     the server account's, mode 0700: the socket (elsewhere where the path is too long)
        install-.../             a copy of the binaries, only where the server account cannot reach the wheel's

There are no passwords: the only access is the socket, and its directory is closed to other users.
"""

from tersely.embedded_postgres.account import default_data_dir
from tersely.embedded_postgres.errors import EmbeddedPostgresError
from tersely.embedded_postgres.server import EmbeddedPostgres, embedded_postgres, open_embedded_postgres
from tersely.embedded_postgres.upgrade import upgrade_cluster

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedPostgresError",
    "default_data_dir",
    "embedded_postgres",
    "open_embedded_postgres",
    "upgrade_cluster",
]
