"""An empty database made in one step from the state that all migrations lead to.

Django applies migrations one operation at a time and builds the classes of every related model anew for each of them:
some 200 operations cost 12 s of CPU, nearly all of it in those classes and hardly any in the database. Where nothing
is there yet the road does not matter, only its end: the end state is built once, each table is made in it with its
indexes and constraints, what is written as SQL or as Python runs at its place among them, and every migration is
recorded. `tests/portal/kernel/test_fresh_database.py` holds that both ways give the same database.
"""

from collections.abc import Sequence

from django.contrib.postgres.operations import CreateExtension
from django.core.management.sql import emit_post_migrate_signal
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations import Migration
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import RunPython, RunSQL, SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation
from django.db.migrations.operations.fields import FieldOperation
from django.db.migrations.operations.models import CreateModel, IndexOperation, ModelOperation
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState

IN_THE_STATE = (ModelOperation, FieldOperation, IndexOperation)  # wholly told by the end state
AT_ITS_PLACE = (RunSQL, RunPython, CreateExtension)  # to be carried out, in order


def is_empty(connection: BaseDatabaseWrapper) -> bool:
    """Whether the database has no table at all in the schema that we write to."""
    with connection.cursor() as cursor:
        return not connection.introspection.table_names(cursor)


def make(connection: BaseDatabaseWrapper, *, verbosity: int = 0, interactive: bool = False) -> bool:
    """Make every table of the site in an empty database and record all migrations, in one transaction.

    False, and nothing done, where some migration does what is neither told by the end state nor runs inside a
    transaction (a concurrent index, a move of data between databases): the caller then migrates step by step.
    """
    loader = MigrationLoader(None, ignore_no_migrations=True)
    plan = _plan(loader)
    if not all(migration.atomic and all(map(_is_known, migration.operations)) for migration in plan):
        return False
    state: ProjectState = loader.project_state()
    with transaction.atomic(using=connection.alias), connection.schema_editor() as editor:
        made: set[tuple[str, str]] = set()
        for migration in plan:
            for operation in migration.operations:
                _carry_out(operation, migration.app_label, state, editor, made)
        _make_renamed(state, editor, made)
        _record(connection, plan)
    emit_post_migrate_signal(
        verbosity,
        interactive,
        connection.alias,
        apps=state.apps,
        plan=[(migration, False) for migration in plan],
    )
    return True


def _plan(loader: MigrationLoader) -> Sequence[Migration]:
    """Every migration once, each after those that it depends on, as `migrate` would apply them."""
    keys: dict[tuple[str, str], None] = {}
    for leaf in loader.graph.leaf_nodes():
        keys.update(dict.fromkeys(loader.graph.forwards_plan(leaf)))
    return [loader.graph.nodes[key] for key in keys]


def _record(connection: BaseDatabaseWrapper, plan: Sequence[Migration]) -> None:
    """Note all as applied, and what a squashed one stands for with it, as `migrate` does."""
    recorder = MigrationRecorder(connection)
    recorder.ensure_schema()
    names = dict.fromkeys(
        key for migration in plan for key in (*migration.replaces, (migration.app_label, migration.name))
    )
    recorder.migration_qs.bulk_create(recorder.Migration(app=app, name=name) for app, name in names)


def _is_known(operation: Operation) -> bool:
    if isinstance(operation, SeparateDatabaseAndState):  # a table made anew by SQL, its fields told beside it
        return all(isinstance(each, AT_ITS_PLACE) for each in operation.database_operations) and all(
            isinstance(each, FieldOperation | IndexOperation) for each in operation.state_operations
        )
    return isinstance(operation, IN_THE_STATE + AT_ITS_PLACE)


def _carry_out(
    operation: Operation,
    app: str,
    state: ProjectState,
    editor: BaseDatabaseSchemaEditor,
    made: set[tuple[str, str]],
) -> None:
    """One operation of an application against the end state; models that a later migration drops are never made."""
    if isinstance(operation, CreateModel):
        key = (app, operation.name_lower)
        if key not in state.models:
            return
        made.add(key)
    elif isinstance(operation, IN_THE_STATE):
        return
    operation.database_forwards(app, editor, state, state)


def _make_renamed(state: ProjectState, editor: BaseDatabaseSchemaEditor, made: set[tuple[str, str]]) -> None:
    """Tables whose model was made under another name."""
    for app, name in sorted(set(state.models) - made):
        model = state.apps.get_model(app, name)
        if model._meta.managed and not model._meta.proxy:
            editor.create_model(model)
