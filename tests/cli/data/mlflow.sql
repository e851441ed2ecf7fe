CREATE TABLE "experiments" (
	experiment_id INTEGER NOT NULL,
	name VARCHAR(256) NOT NULL,
	artifact_location VARCHAR(256),
	lifecycle_stage VARCHAR(32),
	creation_time BIGINT,
	last_update_time BIGINT,
	workspace VARCHAR(63) DEFAULT 'default' NOT NULL,
	CONSTRAINT experiment_pk PRIMARY KEY (experiment_id),
	CONSTRAINT experiments_lifecycle_stage CHECK (lifecycle_stage IN ('active', 'deleted')),
	CONSTRAINT uq_experiments_workspace_name UNIQUE (workspace, name)
);
INSERT INTO "experiments" VALUES(0,'Default','/home/somebody/mlruns/0','active',1795390676516,1795390676516,'default');
INSERT INTO "experiments" VALUES(1,'digits','/home/somebody/mlruns/1','active',1795390676537,1795390676537,'default');
CREATE TABLE "metrics" (
	"key" VARCHAR(250) NOT NULL,
	value FLOAT NOT NULL,
	timestamp BIGINT NOT NULL,
	run_uuid VARCHAR(32) NOT NULL,
	step BIGINT DEFAULT '0' NOT NULL,
	is_nan BOOLEAN DEFAULT '0' NOT NULL,
	CONSTRAINT metric_pk PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan),
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid),
	CHECK (is_nan IN (0, 1))
);
INSERT INTO "metrics" VALUES('train/loss',1.0,1795390676610,'37a645026d594f9196d921e36adb8ef2',0,0);
INSERT INTO "metrics" VALUES('train/loss',0.5,1795390676627,'37a645026d594f9196d921e36adb8ef2',1,0);
INSERT INTO "metrics" VALUES('train/loss',3.33333333333333314829e-01,1795390676645,'37a645026d594f9196d921e36adb8ef2',2,0);
INSERT INTO "metrics" VALUES('train/loss',0.25,1795390676667,'37a645026d594f9196d921e36adb8ef2',3,0);
INSERT INTO "metrics" VALUES('train/loss',0.2,1795390676684,'37a645026d594f9196d921e36adb8ef2',4,0);
INSERT INTO "metrics" VALUES('gap',0.0,1795390676704,'37a645026d594f9196d921e36adb8ef2',0,1);
INSERT INTO "metrics" VALUES('loss',2.0,1795390676801,'b761093118834f89ba3dace8854699aa',0,0);
CREATE TABLE "params" (
	"key" VARCHAR(250) NOT NULL,
	value VARCHAR(8000) NOT NULL,
	run_uuid VARCHAR(32) NOT NULL,
	CONSTRAINT param_pk PRIMARY KEY ("key", run_uuid),
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid)
);
INSERT INTO "params" VALUES('lr','0.1','37a645026d594f9196d921e36adb8ef2');
INSERT INTO "params" VALUES('layers','[1, 2]','37a645026d594f9196d921e36adb8ef2');
INSERT INTO "params" VALUES('kind','mlp','37a645026d594f9196d921e36adb8ef2');
CREATE TABLE "runs" (
	run_uuid VARCHAR(32) NOT NULL,
	name VARCHAR(250),
	source_type VARCHAR(20),
	source_name VARCHAR(500),
	entry_point_name VARCHAR(50),
	user_id VARCHAR(256),
	status VARCHAR(9),
	start_time BIGINT,
	end_time BIGINT,
	source_version VARCHAR(50),
	lifecycle_stage VARCHAR(20),
	artifact_uri VARCHAR(200),
	experiment_id INTEGER, deleted_time BIGINT,
	CONSTRAINT run_pk PRIMARY KEY (run_uuid),
	CONSTRAINT runs_lifecycle_stage CHECK (lifecycle_stage IN ('active', 'deleted')),
	CONSTRAINT source_type CHECK (source_type IN ('NOTEBOOK', 'JOB', 'LOCAL', 'UNKNOWN', 'PROJECT')),
	FOREIGN KEY(experiment_id) REFERENCES experiments (experiment_id),
	CHECK (status IN ('SCHEDULED', 'FAILED', 'FINISHED', 'RUNNING', 'KILLED'))
);
INSERT INTO "runs" VALUES('37a645026d594f9196d921e36adb8ef2','wide','UNKNOWN','','','root','FINISHED',1795390676565,1795390676740,'','active','/home/somebody/mlruns/1/37a645026d594f9196d921e36adb8ef2/artifacts',1,NULL);
INSERT INTO "runs" VALUES('b761093118834f89ba3dace8854699aa','bad','UNKNOWN','','','root','FAILED',1795390676775,1795390676827,'','active','/home/somebody/mlruns/1/b761093118834f89ba3dace8854699aa/artifacts',1,NULL);
CREATE TABLE "tags" (
	"key" VARCHAR(250) NOT NULL,
	value VARCHAR(8000),
	run_uuid VARCHAR(32) NOT NULL,
	CONSTRAINT tag_pk PRIMARY KEY ("key", run_uuid),
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid)
);
INSERT INTO "tags" VALUES('mlflow.user','root','37a645026d594f9196d921e36adb8ef2');
INSERT INTO "tags" VALUES('mlflow.source.name','mk.py','37a645026d594f9196d921e36adb8ef2');
INSERT INTO "tags" VALUES('mlflow.source.type','LOCAL','37a645026d594f9196d921e36adb8ef2');
INSERT INTO "tags" VALUES('mlflow.runName','wide','37a645026d594f9196d921e36adb8ef2');
INSERT INTO "tags" VALUES('who','x','37a645026d594f9196d921e36adb8ef2');
INSERT INTO "tags" VALUES('mlflow.user','root','b761093118834f89ba3dace8854699aa');
INSERT INTO "tags" VALUES('mlflow.source.name','mk.py','b761093118834f89ba3dace8854699aa');
INSERT INTO "tags" VALUES('mlflow.source.type','LOCAL','b761093118834f89ba3dace8854699aa');
INSERT INTO "tags" VALUES('mlflow.runName','bad','b761093118834f89ba3dace8854699aa');
